"""Read MATLAB files of version 5 to 7: ImageNet describes its classes in one.

Written after MathWorks' "MAT-File Format"; what ImageNet's file does not use is left out: sparse
and complex numbers, cells, objects, big-endian files. SciPy reads all of it, but not safely: a
damaged file of two kilobytes ended the process.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_HEADER = 128
_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8",
          12: "<i8", 13: "<u8"}  # fmt: skip
_TEXTS = {1: "latin1", 2: "latin1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}
_MATRIX, _COMPRESSED = 14, 15
_STRUCT, _CHAR, _NUMBERS = 2, 4, range(6, 16)


def read_matlab(data: bytes) -> dict[str, Any]:
    """Return the variables of a file: arrays flattened, texts as str, structs as lists of dicts.

    Raises:
        ValueError: it is damaged, or of another kind.
    """
    if data[126:_HEADER] != b"IM":
        raise ValueError("it is no little-endian MATLAB file of version 5 to 7")
    try:
        return dict(_matrix(body) for kind, body in _elements(data[_HEADER:]) if kind == _MATRIX)
    except Exception as error:  # nearly every kind: the pieces are taken as they come
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and content of the elements that stand one after another."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # a small one: size and type share the first word, the content the second
            yield kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]
            at += 8
            continue
        body = data[at + 8 : at + 8 + size]
        if len(body) < size:
            raise ValueError("it is cut off")
        if kind == _COMPRESSED:
            yield from _elements(zlib.decompress(body))
            at += 8 + size
        else:
            yield kind, body
            at += 8 + -(-size // 8) * 8


def _matrix(body: bytes) -> tuple[str, Any]:
    """Return the name and the value of an array."""
    if not body:
        return "", None
    flags, shape, (_, name), *fields = _elements(body)
    kind = int(_numbers(*flags)[0]) & 0xFF
    if kind == _STRUCT:
        return name.decode("latin1"), _structs(fields, math.prod(_numbers(*shape).tolist()))
    if kind != _CHAR and kind not in _NUMBERS:
        raise ValueError(f"{name!r} is an array of class {kind}")
    stored = fields[0] if fields else (_CHAR, b"")
    text_or_numbers = stored[1].decode(_TEXTS[stored[0]]) if kind == _CHAR else _numbers(*stored)
    return name.decode("latin1"), text_or_numbers


def _structs(elements: list[tuple[int, bytes]], count: int) -> list[dict[str, Any]]:
    (kind, size), (_, names), *values = elements
    length = int(_numbers(kind, size)[0])
    keys = [
        names[start : start + length].split(b"\0", 1)[0].decode("latin1")
        for start in range(0, len(names), length)
    ]
    bodies = iter([body for _, body in values])
    return [{key: _matrix(next(bodies))[1] for key in keys} for _ in range(count * bool(keys))]


def _numbers(kind: int, body: bytes) -> np.ndarray:
    return np.frombuffer(body, dtype=_TYPES[kind])
