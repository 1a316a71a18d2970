"""The origin of a recipe's values: a file, the command line, or the environment.

Values from the environment are recorded by name rather than by value, if they may be secret: paths,
and options of loggers and evaluations. Other keys are numbers and names from short lists, which are
needed to rebuild the model; these are recorded as they are.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pospre.recipe.files import merged, read_parts
from pospre.recipe.yaml_text import apply_overrides, key_parts, set_variables, variables

PRIVATE = (
    "data.path",
    "data.labels",
    "data.cache_dir",
    "encoder.weights",
    "reference.weights",
    "trainer.run_folder",
    "trainer.save_folder",
    "loggers",
    "evaluation",
    "verdict.data",
)
COMPARED = ("data.labels", "encoder.weights", "reference.weights")
"""Private keys that must not change between two starts of a run."""

_COLUMN = 48  # of the comments


def origins(path: Path, overrides: Iterable[str] = ()) -> dict[str, str]:
    """Return the origins of a recipe's written values by dotted key; others are defaults."""
    base, own = read_parts(path)
    data, origin = own, {}
    if base is not None:
        data = merged(base[1], own)
        origin = dict.fromkeys((key for key, _ in values(base[1])), str(base[0]))
    origin.update(dict.fromkeys((key for key, _ in values(own)), str(path)))
    for item in overrides:
        apply_overrides(data, [item])
        target = item.partition("=")[0]
        origin = {key: name for key, name in origin.items() if not within(key, target)}
        changed = (key for key, _ in values(data) if within(key, target))
        origin.update(dict.fromkeys(changed, "command line"))
    written = {key: value for key, value in values(data) if key in origin}
    said = {key: ", ".join([origin[key], *variables(value)]) for key, value in written.items()}
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


class Taken(NamedTuple):
    """A value from the environment; ``written`` is its reference, such as ``${NAME}`` in a text."""

    written: Any
    value: Any


def taken(
    written: Mapping[str, Any], filled: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Taken]]:
    """Yield dotted keys whose values come from the environment, not from the recipe's defaults.

    Args:
        written: a recipe or a section of it.
        filled: the same with all variables filled in.
        prefix: prefix of the keys.
    """
    for name, value in filled.items():
        key, own = f"{prefix}{name}", written[name]
        if isinstance(own, Mapping):
            yield from taken(own, value, f"{key}.")
        elif set_variables(own):
            inside = values(value) if isinstance(value, Mapping) else ()
            yield from ((f"{key}.{sub}", Taken(own, part)) for sub, part in inside)
            yield key, Taken(own, value)


def with_references(value: Any, taken: Mapping[str, Taken], key: str = "") -> Any:
    """Return a complete recipe, or its part at ``key``, with references for private keys."""
    if isinstance(value, dict):
        prefix = f"{key}." if key else ""
        return {k: with_references(part, taken, f"{prefix}{k}") for k, part in value.items()}
    is_private = key in taken and any(within(key, private) for private in PRIVATE)
    # values changed by code since no longer come from the environment
    return taken[key].written if is_private and taken[key].value == value else value


def concealed(value: Any, taken: Mapping[str, Taken]) -> Any:
    """Return ``value`` with references in place of private texts and paths."""
    if isinstance(value, dict):
        return {key: concealed(part, taken) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [concealed(part, taken) for part in value]
    if isinstance(value, str):
        for key, (written, secret) in taken.items():
            is_text = isinstance(secret, str) and any(within(key, private) for private in PRIVATE)
            if is_text and secret and (value == secret or value.startswith(f"{secret}/")):
                return f"{written}{value.removeprefix(secret)}"
    return value


def annotated(text: str, taken: Mapping[str, Taken]) -> str:
    """Return a recipe's text after comments that list values from the environment."""
    lines = []
    for key, value in taken.items():
        names = ", ".join(f"${name}" for name in set_variables(value.written))
        lines.append(f"# {key}: from the environment, {names}\n")
    return "".join(lines) + text


def fingerprint(run_name: str, key: str, value: Any) -> str:
    """Return a hash that shows whether a value is the same, and is slow to guess."""
    salt = f"pospre {run_name} {key}".encode()
    return hashlib.scrypt(str(value).encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=16).hex()
