"""Pickles of others, read into records: nothing that a file names is called, or changed."""

import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, BinaryIO, ClassVar

import torch

# what takes memory unseen, hashes what may be nested deeply, or goes past ``find_class``
_REFUSED = (
    pickle.BYTEARRAY8,
    pickle.FROZENSET,
    pickle.ADDITEMS,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
)


def plain_key(key: Any) -> str | int:
    """Return a key; ``ValueError`` unless it is a text or a whole number.

    The hash of a tuple that is nested deeply ends the process.
    """
    if type(key) not in (str, int):
        raise ValueError(f"a key is a {type(key).__name__}")
    plain: str | int = key
    return plain


def _with_plain_keys(method: Any, keys: slice) -> Any:
    """Return a method of pickle's that refuses other keys than plain ones."""

    def checked(unpickler: Any) -> None:
        for key in unpickler.stack[keys]:
            plain_key(key)
        method(unpickler)

    return checked


_USUAL = pickle._Unpickler.dispatch
_KEYS = {
    pickle.SETITEM[0]: slice(-2, -1),
    pickle.SETITEMS[0]: slice(None, None, 2),
    pickle.DICT[0]: slice(None, None, 2),
}


class Record:
    """A harmless placeholder for an object that a pickle requests: its name and arguments."""

    name: ClassVar[str]

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Record":
        """Accept any arguments."""
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    # a pickle that gives the class a state, instead of an object, calls this with too little
    def __setstate__(self, state: Any) -> None:
        self.state = state


class RecordDict(dict[Any, Any]):
    """An ordered dict of a pickle; what it keeps besides its items is left out."""

    given: Any = ()

    def __init__(self, items: Any = ()) -> None:
        self.given = items  # as Python 2 wrote them, not copied: a few bytes can ask for it again

    def pairs(self) -> Iterator[tuple[str | int, Any]]:
        """Yield keys and values."""
        given = self.given.items() if isinstance(self.given, dict) else self.given
        for key, value in chain(given, self.items()):
            yield plain_key(key), value

    def __setstate__(self, state: Any) -> None:
        pass


def record_kind(name: str) -> type[Record]:
    """Return the class of records of one name."""
    return type(name, (Record,), {"name": name})


class Records(pickle._Unpickler):
    """Reads a pickle into plain values, dtypes and records.

    Python's own, not the one in C: that one takes memory for whatever number a file names.
    ``kinds`` are what a file may name, and what that makes; ``storage`` is called with what it says
    about the storage of a tensor.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: _with_plain_keys(method, _KEYS[code]) if code in _KEYS else method
        for code, method in _USUAL.items()
        if bytes([code]) not in _REFUSED
    }

    def __init__(
        self, file: BinaryIO, kinds: dict[str, type], storage: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._kinds, self._storage = kinds, storage

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name; ``UnpicklingError`` unless the name is harmless."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        try:
            return self._kinds[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        """Return the replacement of a storage."""
        if self._storage is None:
            raise pickle.UnpicklingError("it names a storage")
        return self._storage(pid)
