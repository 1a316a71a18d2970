"""Read MATLAB files of version 5 to 7: ImageNet describes its classes in one.

Written after MathWorks' "MAT-File Format"; what ImageNet's file does not use is left out: sparse
and complex numbers, cells, objects, big-endian files.
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
_DAMAGE = (struct.error, zlib.error, StopIteration, LookupError, TypeError, ValueError,
           OverflowError)  # fmt: skip
_STRUCT, _CHAR, _NUMBERS = 2, 4, range(6, 16)


class MatlabError(ValueError):
    """It is damaged, or of another kind."""


def read_matlab(data: bytes) -> dict[str, Any]:
    """Return the variables of a file: arrays flattened, texts as str, structs as lists of dicts.

    Raises:
        MatlabError: it is damaged, or of another kind.
    """
    if data[126:128] != b"IM":
        raise MatlabError("it is no little-endian MATLAB file of version 5 to 7")
    try:
        found = [_matrix(body) for kind, body in _elements(data[_HEADER:]) if kind == _MATRIX]
    except _DAMAGE as error:
        raise MatlabError(f"it is damaged ({type(error).__name__}: {error})") from error
    return dict(found)


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
    elements = _elements(body)
    flags = _numbers(*next(elements))
    shape = _numbers(*next(elements))
    name = next(elements)[1].decode("latin1")
    kind = int(flags[0]) & 0xFF
    if kind == _STRUCT:
        return name, _structs(elements, math.prod(shape.tolist()))
    if kind != _CHAR and kind not in _NUMBERS:
        raise ValueError(f"{name or 'a field'} is an array of class {kind}")
    stored = next(elements, (_CHAR, b""))
    if kind == _CHAR:
        return name, stored[1].decode(_TEXTS[stored[0]])
    return name, _numbers(*stored)


def _structs(elements: Iterator[tuple[int, bytes]], count: int) -> list[dict[str, Any]]:
    length = int(_numbers(*next(elements))[0])
    names = next(elements)[1]
    fields = [
        names[start : start + length].split(b"\0", 1)[0].decode("latin1")
        for start in range(0, len(names), length)
    ]
    return [{field: _matrix(next(elements)[1])[1] for field in fields} for _ in range(count)]


def _numbers(kind: int, body: bytes) -> np.ndarray:
    return np.frombuffer(body, dtype=_TYPES[kind])
