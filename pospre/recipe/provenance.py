"""The complete recipe as text, with the origin of each value."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pospre.recipe.extends import merged, read_parts
from pospre.recipe.yaml_text import apply_overrides, key_parts, variables

_COLUMN = 48  # of the comments


def origins(path: Path, overrides: Iterable[str] = ()) -> dict[str, str]:
    """Return the origins of a recipe's written values by dotted key; others are defaults."""
    base, own = read_parts(path)
    data, found = own, {}
    if base is not None:
        data = merged(base[1], own)
        found = dict.fromkeys((key for key, _ in values(base[1])), str(base[0]))
    found.update(dict.fromkeys((key for key, _ in values(own)), str(path)))
    for item in overrides:
        apply_overrides(data, [item])
        target = item.partition("=")[0]
        found = {key: name for key, name in found.items() if not within(key, target)}
        changed = (key for key, _ in values(data) if within(key, target))
        found.update(dict.fromkeys(changed, "command line"))
    written = {key: value for key, value in values(data) if key in found}
    said = {key: ", ".join([found[key], *variables(value)]) for key, value in written.items()}
    return {"run_name": "name of the file", **said}


def annotate(recipe: Mapping[str, Any], came_from: Mapping[str, str]) -> str:
    """Return a complete recipe as YAML with a comment after every value.

    Args:
        recipe: all plain values.
        came_from: origin of each value by dotted key; others are defaults.
    """
    lines = []
    for key, value in _entries(recipe):
        *parents, name = key_parts(key)
        indent = "  " * len(parents)
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:")
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20)
        text = text.removesuffix("...\n").strip()  # how YAML ends a bare value
        line = f"{indent}{name}: {text}"
        lines.append(f"{line:{_COLUMN}} # {came_from.get(key, 'default')}")
    return "\n".join(lines)


def values(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of everything except sections."""
    for key, value in _entries(section):
        if not (isinstance(value, Mapping) and value):
            yield key, value


def _entries(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value, sections before what is in them."""
    for name, value in section.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")


def within(key: str, section: str) -> bool:
    """Return whether a dotted key is a section's, or within it."""
    return key == section or key.startswith(f"{section}.")
