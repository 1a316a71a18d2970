"""Files of arrays that are written in place, row by row: ``.npy`` and safetensors."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SHARD_BYTES = 5_000_000_000
_SAFETENSORS = {"float32": "F32", "float16": "F16"}


@dataclass(frozen=True)
class Array:
    """One array of the result: ``shape`` is (rows, …)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.shape[0] * self.row_bytes


class Part(NamedTuple):
    """Rows of an array that lie one after another in a file, from byte ``offset`` on."""

    array: Array
    rows: range
    offset: int


class ArrayFile(NamedTuple):
    """A file before its rows are written: how it begins, its size, and where rows lie."""

    name: str
    header: bytes
    size: int
    parts: list[Part]


def npy_files(arrays: Sequence[Array]) -> list[ArrayFile]:
    """Return one file per array; ``np.load(file, mmap_mode="r")`` opens it."""
    files = []
    for array in arrays:
        start = io.BytesIO()
        described = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(array.dtype)),
            "fortran_order": False,
            "shape": array.shape,
        }
        np.lib.format.write_array_header_1_0(start, described)
        header = start.getvalue()
        part = Part(array, range(array.shape[0]), len(header))
        size = len(header) + array.num_bytes
        files.append(ArrayFile(f"{array.name}.npy", header, size, [part]))
    return files


def safetensors_files(arrays: Sequence[Array], limit: int = SHARD_BYTES) -> list[ArrayFile]:
    """Return files of at most ``limit`` bytes of numbers, each with some rows of all arrays."""
    rows = arrays[0].shape[0]
    each = max(1, min(rows, limit // sum(array.row_bytes for array in arrays)))
    count = -(-rows // each)
    files = []
    for number in range(count):
        own = range(number * each, min(rows, (number + 1) * each))
        name = "features" if count == 1 else f"features-{number + 1:05d}-of-{count:05d}"
        files.append(_safetensors_file(f"{name}.safetensors", arrays, own))
    return files


def _safetensors_file(name: str, arrays: Sequence[Array], rows: range) -> ArrayFile:
    described, at = {}, 0
    begins = []
    for array in arrays:
        begins.append(at)
        end = at + len(rows) * array.row_bytes
        described[array.name] = {
            "dtype": _SAFETENSORS[array.dtype],
            "shape": [len(rows), *array.shape[1:]],
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    parts = [
        Part(array, rows, len(header) + begin) for array, begin in zip(arrays, begins, strict=True)
    ]
    return ArrayFile(name, header, len(header) + at, parts)
