"""A parser for untrusted JSON; it only raises ValueError."""

import json
import math
from contextlib import suppress
from typing import Any, TypeGuard

from pospre.text_lists import decode_text

INTEGERS = range(-(1 << 63), 1 << 64)
"""Those of 64 bits: larger ones overflow later."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; bytes are decoded as a user's text.

    Raises:
        ValueError: it is not text or not JSON, is nested too deeply, or has a number that is not
            finite or an integer of more than 64 bits.
    """
    if isinstance(text, bytes):
        text = decode_text(text)
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text; see ``parse_json``.

    Raises:
        ValueError: as in ``parse_json``, or it is not an object.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f"it must hold an object, not a {type(content).__name__}")
    return content


def parse_steps(lines: bytes) -> list[dict[str, Any]]:
    """Return the objects of a text with one object per line, each with its ``step``.

    Invalid lines are skipped: they were cut off by a kill, or damaged on disk.
    """
    steps = []
    for line in lines.splitlines():
        with suppress(ValueError):
            content = parse_object(line)
            if type(content.get("step")) is int:
                steps.append(content)
    return steps


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite int or float (a bool is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(text: str) -> int:
    value = int(text)
    if value not in INTEGERS:
        raise ValueError(f"{text[:30]}… is not a 64-bit integer")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:30]} is not finite")
    return value
