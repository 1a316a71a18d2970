"""Read pickles of dictionaries, lists, texts, numbers and numpy arrays, and of nothing else.

A pickle may run any program when it is loaded. Here the few names that arrays need are the only
ones it may use.
"""

import pickle
from io import BytesIO
from typing import Any

import numpy as np

_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class PickleError(ValueError):
    """It is damaged, or holds something else."""


def load_arrays(data: bytes) -> Any:
    """Return what a pickle holds; texts of Python 2 are taken as Latin-1.

    Raises:
        PickleError: it is damaged, or asks for anything but arrays.
    """
    try:
        return _Unpickler(BytesIO(data), encoding="latin1").load()
    except PickleError:
        raise
    except Exception as error:  # a damaged pickle may raise whatever its pieces do
        raise PickleError(f"it is damaged ({type(error).__name__}: {error})") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if (module, name) not in _ALLOWED:
            raise PickleError(f"it asks for {module}.{name}, which data needs not")
        return _ALLOWED[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise PickleError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")
