"""Read pickles of dictionaries, lists, texts, numbers and numpy arrays, and of nothing else.

A pickle may run any program when it is loaded. Here stand-ins take the place of the few names that
arrays need: numpy's own would make arrays of objects out of any bytes, which then are pointers.
"""

import math
import pickle
import re
from io import BytesIO
from typing import Any

import numpy as np


class PickleError(ValueError):
    """It is damaged, or holds something else."""


def load_arrays(data: bytes) -> Any:
    """Return what a pickle holds; texts of Python 2 are taken as Latin-1.

    Raises:
        PickleError: it is damaged, or asks for anything but arrays of numbers.
    """
    try:
        return _Unpickler(BytesIO(data), encoding="latin1").load()
    except PickleError:
        raise
    except Exception as error:  # a damaged pickle may raise whatever its pieces do
        raise PickleError(f"it is damaged ({type(error).__name__}: {error})") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise PickleError(f"it asks for {module}.{name}, which data needs not")
        return _ALLOWED[module, name]


class _Numbers:
    """Stand in for ``numpy.dtype``: booleans, whole numbers and floats, and nothing else."""

    def __init__(self, code: str, *_: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biuf]\d{1,2}", code):
            raise PickleError(f"it holds an array of {code!r}, which are no numbers")
        self._code = code
        self._order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = {"<": "<", ">": ">", "|": "|"}[state[1]]

    def real(self) -> np.dtype[Any]:
        """Return the type of the numbers."""
        return np.dtype(self._order + self._code)


class _Array(np.ndarray):
    """Stand in for ``numpy.ndarray``: empty whatever is asked for, until its state comes."""

    def __new__(cls, *_: Any) -> "_Array":
        return np.empty(0, np.uint8).view(cls)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, numbers, is_fortran, data = state
        raw = data.encode("latin1") if isinstance(data, str) else data
        kind = numbers.real() if isinstance(numbers, _Numbers) else None
        if kind is None or not isinstance(raw, bytes) or not all(side >= 0 for side in shape):
            raise PickleError("it holds an array of no numbers")
        if math.prod(shape) * kind.itemsize != len(raw):
            raise PickleError(f"it holds an array of {shape} in {len(raw)} bytes")
        super().__setstate__((1, tuple(shape), kind, is_fortran, raw))


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise PickleError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Numbers,
    ("_codecs", "encode"): _encode,
}
