"""The options of a class in words, for ``--help``, ``--options`` and the READMEs."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pospre.arguments import section_of
from pospre.command_line import spelled
from pospre.docstrings import meanings, option_names

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


class Option(NamedTuple):
    """An option in words: the values that it takes, its default (None: required), its meaning."""

    takes: str
    default: str | None
    meaning: str


def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a class by name, own ones before those of its bases."""
    described, model = meanings(kind), kind
    if not issubclass(model, BaseModel):
        model = section_of(kind)
    schema = model.model_json_schema(mode="validation")
    return {
        name: Option(
            takes=_takes(schema["properties"][name], schema),
            default=_default(model.model_fields[name].default),
            meaning=re.sub(r"\bNone\b", "null", described.get(name, "").replace("``", "")),
        )
        for name in option_names(kind)
    }


def option_lines(kind: type, *others: str) -> Iterator[str]:
    """Yield the lines of each option: its name, values and default, then its meaning.

    ``others`` are arguments of the class that are no options.
    """
    for name, option in options_of(kind).items():
        if name in others:
            continue
        default = " (required)" if option.default is None else f" = {option.default}"
        yield f"\n  {name}: {option.takes}{default}"
        if option.meaning:
            yield textwrap.indent(textwrap.fill(option.meaning, _WIDTH), "      ")


def _default(value: Any) -> str | None:
    if value is PydanticUndefined:
        return None
    if isinstance(value, BaseModel):
        return spelled(value.model_dump(exclude_defaults=True))
    return spelled(value) or "''"


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
        return " | ".join(map(spelled, part.get("enum", [part.get("const")])))
    kind = part.get("type")
    if kind == "array":
        each = [_takes(entry, schema) for entry in part.get("prefixItems", [])]
        return f"[{', '.join(each or [_takes(part.get('items', {}), schema), '…'])}]"
    bounds = ", ".join(f"{sign} {part[key]:.10g}" for key, sign in _BOUNDS.items() if key in part)
    word = _TYPES.get(str(kind), "any")
    return f"{word} {bounds}".strip()
