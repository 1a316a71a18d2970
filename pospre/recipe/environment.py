"""Values of a recipe from the environment, which are recorded by name rather than by value.

Paths, and options of loggers and evaluations, may be secret. Other keys are numbers and names from
short lists, which are needed to rebuild the model: these are recorded as they are.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pospre.recipe.provenance import values, within
from pospre.recipe.yaml_text import set_variables

PRIVATE = (
    "data.path",
    "data.labels",
    "data.cache_dir",
    "encoder.weights",
    "trainer.run_folder",
    "trainer.save_folder",
    "loggers",
    "evaluation",
)
COMPARED = ("data.labels", "encoder.weights")
"""Private keys that must not change between two starts of a run."""


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
        prefix: of the keys.
    """
    for name, value in filled.items():
        key, own = f"{prefix}{name}", written[name]
        if isinstance(own, Mapping):
            yield from taken(own, value, f"{key}.")
        elif set_variables(own):
            inside = values(value) if isinstance(value, Mapping) else ()
            yield from ((f"{key}.{sub}", Taken(own, part)) for sub, part in inside)
            yield key, Taken(own, value)


def with_references(value: Any, found: Mapping[str, Taken], key: str = "") -> Any:
    """Return a complete recipe, or its part at ``key``, with references for private keys."""
    if isinstance(value, dict):
        prefix = f"{key}." if key else ""
        return {k: with_references(part, found, f"{prefix}{k}") for k, part in value.items()}
    is_private = key in found and any(within(key, place) for place in PRIVATE)
    # values changed by code since no longer come from the environment
    return found[key].written if is_private and found[key].value == value else value


def concealed(value: Any, found: Mapping[str, Taken]) -> Any:
    """Return ``value`` with references in place of private texts and paths."""
    if isinstance(value, dict):
        return {key: concealed(part, found) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [concealed(part, found) for part in value]
    if isinstance(value, str):
        for key, (written, secret) in found.items():
            is_text = isinstance(secret, str) and any(within(key, place) for place in PRIVATE)
            if is_text and secret and (value == secret or value.startswith(f"{secret}/")):
                return f"{written}{value.removeprefix(secret)}"
    return value


def annotated(text: str, found: Mapping[str, Taken]) -> str:
    """Return a recipe's text after comments that list values from the environment."""
    lines = []
    for key, value in found.items():
        names = ", ".join(f"${name}" for name in set_variables(value.written))
        lines.append(f"# {key}: from the environment, {names}\n")
    return "".join(lines) + text


def fingerprint(run_name: str, key: str, value: Any) -> str:
    """Return a hash that shows whether a value is the same, and is slow to guess."""
    salt = f"pospre {run_name} {key}".encode()
    return hashlib.scrypt(str(value).encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=16).hex()
