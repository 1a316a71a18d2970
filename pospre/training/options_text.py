"""The options of a section, algorithm or position scheme, for ``--options``."""

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from pospre.errors import UserError, suggestion
from pospre.external_class import load_class
from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.nn.positions import SCHEMES, scheme_class
from pospre.nn.positions.scheme import Scheme
from pospre.option_texts import option_lines
from pospre.recipe.recipe import Recipe
from pospre.trust import trust_classes


def options_text(name: str | None) -> str:
    """Return the options of a part of a recipe, one per line; None: all names.

    A section is dotted (``encoder``, ``data.views``, ``trainer``), an algorithm or position scheme
    is named as in recipes.
    """
    names = {
        "sections": [*recipe_sections()],
        "algorithms": algorithm_names(),
        "positions": [*SCHEMES],
    }
    if name is None:
        return "\n".join(f"{kind}: {', '.join(known)}" for kind, known in names.items())
    known = [each for kind in names.values() for each in kind]
    if name not in known and ":" not in name:
        raise UserError(
            f"--options: '{name}' is no section, algorithm or position scheme."
            f"{suggestion(name, known)}"
        )
    kind = _class_of(name)
    first = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "")
    return "\n".join([f"{name}: {first}", *option_lines(kind, "dims")])


def _class_of(name: str) -> type:
    """Return what declares the options of ``name``."""
    if name in (sections := recipe_sections()):
        return sections[name]
    trust_classes([name])
    if name in SCHEMES:
        return scheme_class(name)
    if ":" in name and issubclass(kind := load_class(name, "--options", "mylab.loca:LOCA"), Scheme):
        return kind
    return algorithm_class(name)


def recipe_sections() -> dict[str, type[BaseModel]]:
    """Return the sections of a recipe by their dotted names; ``recipe`` is all of it."""
    return {"recipe": Recipe, **dict(_sections(Recipe))}


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the sub-sections of a section by their dotted names."""
    for name, field in model.model_fields.items():
        for kind in _models(field.annotation):
            yield prefix + name, kind
            yield from _sections(kind, f"{prefix}{name}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the section in an annotation such as ``Augment | None`` or ``dict[str, View]``."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = getattr(annotation, "__args__", ())
    return [kind for part in inner for kind in _models(part)]
