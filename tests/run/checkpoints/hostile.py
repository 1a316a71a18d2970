"""Pickles that someone hostile would write, and ``pickle`` itself never makes."""

import io
import pickle
import zipfile
from collections.abc import Iterable
from typing import Any


class Call:
    """Calls something with ``args`` when it is unpickled; then sets its state and its items."""

    def __init__(self, what: Any, *args: Any, state: Any = None, items: Any = None) -> None:
        self.reduced = what, args, state, None, items and iter(items.items())

    def __reduce__(self) -> Any:
        return self.reduced


class Storage:
    """Claims to be a storage of float32 when it is written by ``pickled``."""

    def __init__(self, count: int, key: str = "0") -> None:
        self.pid = ("storage", Global("torch", "FloatStorage"), key, "cpu", count)


class Global:
    """A name, whether it is there or not."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None:
        """Let pickle take it for something that can be called."""


class _Pickler(pickle._Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Storage) else None

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        if isinstance(obj, Global):
            name = f"c{obj.module}\n{obj.name}\n".encode()
            self.write(name)  # type: ignore[attr-defined]
            return None
        return super().save(obj, save_persistent_id)  # type: ignore[misc]


def pickled(content: Any) -> bytes:
    """Return a pickle as ``torch.save`` puts it into a file."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(content)
    return stream.getvalue()


def tensor(
    storage: Any, size: Iterable[int], stride: Iterable[int], offset: Any = 0, items: Any = None
) -> Call:
    """Return what ``torch.save`` writes of a tensor; ``items`` are assigned to it."""
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    return Call(rebuild, storage, offset, tuple(size), tuple(stride), False, {}, items=items)


def with_state(name: Global, state: Any) -> bytes:
    """Return a pickle that gives a class, not an object of it, a state."""
    return b"\x80\x02c" + f"{name.module}\n{name.name}\n".encode() + pickled(state)[2:-1] + b"b."


def archive(
    content: Any, records: dict[str, bytes] | None = None, *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """Return a file as ``torch.save`` writes it.

    Args:
        content: bytes of its pickle, or what to pickle.
        records: its storages by key.
        compression: of zipfile.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        data = content if isinstance(content, bytes) else pickled(content)
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")
        for key, record in (records or {}).items():
            file.writestr(f"archive/data/{key}", record)
    return stream.getvalue()
