"""The options of a section or an algorithm, read from their declaration, for ``--options``."""

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from pospre.errors import UserError, suggestion
from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.option_texts import option_lines
from pospre.recipe.recipe import Recipe
from pospre.trust import trust_classes


def options_text(name: str | None) -> str:
    """Return the options of a section or an algorithm, one per line; None: all names.

    A section is dotted (``encoder``, ``data.views``, ``trainer``), an algorithm is named as in
    recipes.
    """
    sections = recipe_sections()
    if name is None:
        return f"sections: {', '.join(sections)}\nalgorithms: {', '.join(algorithm_names())}"
    if name in sections:
        kind: type = sections[name]
    elif name in algorithm_names() or ":" in name:
        trust_classes([name])
        kind = algorithm_class(name)
    else:
        known = [*sections, *algorithm_names()]
        raise UserError(
            f"--options: '{name}' is not a section or algorithm.{suggestion(name, known)}"
        )
    first = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    return "\n".join([f"{name}: {first}", *option_lines(kind)])


def recipe_sections() -> dict[str, type[BaseModel]]:
    """Return the sections of a recipe by their dotted names."""
    return dict(_sections(Recipe))


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
