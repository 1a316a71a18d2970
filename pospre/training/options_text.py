"""The options of a section or an algorithm, read from their declaration, for ``--options``."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pospre.arguments import section_of
from pospre.command_line import argument_texts, spelled
from pospre.errors import UserError, suggestion
from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.recipe.recipe import Recipe
from pospre.trust import trust_classes

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {
    "number": "number",
    "integer": "whole number",
    "boolean": "true | false",
    "object": "section",
    "string": "text",
    "null": "null",
}
_WIDTH = 88


def options_text(name: str | None) -> str:
    """Return the options of a section or an algorithm, one per line; None: all names.

    A section is dotted (``encoder``, ``data.views``, ``trainer``), an algorithm is named as in
    recipes.
    """
    sections = dict(_sections(Recipe))
    if name is None:
        return f"sections: {', '.join(sections)}\nalgorithms: {', '.join(algorithm_names())}"
    if name in sections:
        kind: type = sections[name]
        declared = sections[name]
    elif name in algorithm_names() or ":" in name:
        trust_classes([name])
        kind = algorithm_class(name)
        declared = section_of(kind)
    else:
        known = [*sections, *algorithm_names()]
        raise UserError(
            f"--options: '{name}' is not a section or algorithm.{suggestion(name, known)}"
        )
    first = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    return "\n".join([f"{name}: {first}", *_lines(kind, declared)])


def _lines(kind: type, declared: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of each option: its key, type and default, then its description."""
    meanings = _meanings(kind)
    schema = declared.model_json_schema(mode="validation")
    for key, field in declared.model_fields.items():
        is_open = field.default is PydanticUndefined or field.default == ""
        default = "" if is_open else f" = {_plain(field.default)}"
        yield f"\n  {key}: {_takes(schema['properties'][key], schema)}{default}"
        meaning = field.description or meanings.get(key)
        if meaning:
            yield textwrap.indent(textwrap.fill(meaning, _WIDTH), "      ")


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


def _meanings(kind: type) -> dict[str, str]:
    """Return the descriptions of arguments from the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for each in reversed(inspect.getmro(kind)):
        found |= argument_texts(inspect.cleandoc(each.__doc__ or ""))
    plain = {key: text.replace("``", "") for key, text in found.items()}
    return {key: re.sub(r"\bNone\b", "null", text) for key, text in plain.items()}


def _plain(value: Any) -> str:
    """Return a default as written in a recipe."""
    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return spelled(value)


def _takes(part: dict[str, Any], schema: dict[str, Any]) -> str:
    """Describe in words what a part of a JSON schema accepts."""
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        return "section" if part.get("type") == "object" else _takes(part, schema)
    if "anyOf" in part:
        return " or ".join(_takes(each, schema) for each in part["anyOf"])
    if "allOf" in part:
        return _takes(part["allOf"][0], schema)
    if "enum" in part or "const" in part:
        return " | ".join(map(_plain, part.get("enum", [part.get("const")])))
    kind = part.get("type")
    if kind == "array":
        each = [_takes(entry, schema) for entry in part.get("prefixItems", [])]
        return f"[{', '.join(each or [_takes(part.get('items', {}), schema), '…'])}]"
    bounds = ", ".join(f"{sign} {part[key]:g}" for key, sign in _BOUNDS.items() if key in part)
    word = _TYPES.get(str(kind), "any")
    return f"{word} {bounds}".strip()
