"""Files of ``torch.save``, read without calling anything that they name.

``torch.load`` of torch 2.7 lets a file assign to objects that are no dicts, and trusts its claims
about storages (CVE-2026-24747). Here a pickle makes records, which hold arguments and do nothing.
Tensors are built from them afterwards. Each stays within the bytes of its storage, and all storages
together within those of the file.
"""

import datetime
import io
import math
import pickle
import sys
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pospre.run.checkpoints.records import Record, RecordDict, Records, record_kind

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,  # of kinds that are younger than these
}
_MAGIC = 0x1950A86A20F9469CFC6C  # how files of before torch 1.6 begin
_NAMED = record_kind("a storage")
_LEAST = 1 << 20  # bytes that a tensor may claim in any file: a small one may be expanded


class _Storage:
    """The memory of tensors, as the pickle describes it."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.dtype, self.num_bytes = dtype, count * dtype.itemsize
        self.data = torch.empty(0, dtype=torch.uint8)

    def fill(self, content: bytes) -> None:
        """Keep the bytes of the file."""
        self.data = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.data.numpy()[:] = memoryview(content)


class _Storages:
    """All storages of a file, each once, together no larger than the file."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.by_key: dict[str, _Storage] = {}
        self._claimed = 0

    def __call__(self, pid: Any) -> Record:
        """Return the replacement of a storage, which the pickle itself cannot access."""
        word, kind, key, _, count, *view = pid
        if word != "storage" or any(view) or type(key) is not str or type(count) is not int:
            raise ValueError("a storage has an unknown description")
        storage = _Storage(_STORAGES[kind.name], count)
        known = self.by_key.setdefault(key, storage)
        if known is storage:
            self._claimed += storage.num_bytes
        if (known.dtype, known.num_bytes) != (storage.dtype, storage.num_bytes):
            raise ValueError(f"storage {key} has two types or sizes")
        if count < 0 or self._claimed > self.num_bytes:
            raise ValueError(f"its storages claim more than the {self.num_bytes} bytes of the file")
        return _NAMED(key)

    def tensor(
        self, dtype: torch.dtype | None, storage: Any, offset: Any, size: Any, stride: Any
    ) -> Tensor:
        """Return a tensor, if it lies within its storage, of whose kind it is by default."""
        if type(storage) is not _NAMED:
            raise ValueError("a tensor has no storage")
        storage, numbers = self.by_key[storage.args[0]], (offset, *size, *stride)
        if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("a tensor has an unknown description")
        dtype = dtype or storage.dtype
        width, count = dtype.itemsize, math.prod(size)
        steps = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else -1
        if (offset + steps + 1) * width > storage.num_bytes:
            raise ValueError("a tensor reaches beyond its storage")
        if count * width > max(self.num_bytes, _LEAST):
            raise ValueError("a tensor claims more than the whole file")
        values = torch.empty(0, dtype=dtype)
        return values.set_(storage.data.untyped_storage(), offset, size, stride)


_TENSOR = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_OTHER_TENSOR = "torch._utils._rebuild_tensor_v3"
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_PLAIN: dict[str, Callable[..., Any]] = {
    "torch.torch_version.TorchVersion": str,
    "datetime.timedelta": datetime.timedelta,
    "torch.device": lambda *names: ":".join(map(str, names)),
    "torch.Size": tuple,
    "__builtin__.set": list,
    "builtins.set": list,
    "_codecs.encode": lambda text, _: text.encode("latin-1"),
    "__builtin__.bytes": bytes,
}
_NAMESPACE = "argparse.Namespace"  # MAE's and DINO's files hold the command line of their training
_NAMES = (*_TENSOR, _OTHER_TENSOR, *_PARAMETER, _SUBCLASS, *_CLASSES, *_PLAIN, _NAMESPACE)
_KINDS: dict[str, type] = {
    **{name: record_kind(name) for name in (*_NAMES, *_STORAGES)},
    "collections.OrderedDict": RecordDict,
    "collections.Counter": RecordDict,
}


class _Contents:
    """Converts the records of a pickle to plain values and tensors, each object once."""

    def __init__(self, storages: _Storages) -> None:
        self._storages = storages
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return the value that a replacement in the pickle stands for."""
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def _make(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._key(key): self.of(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.of(item) for item in value])
        if isinstance(value, Record):
            return self._of_record(value.name, value)
        if isinstance(value, type):
            raise pickle.UnpicklingError(f"it holds {value.__name__} itself")
        return value

    def _key(self, key: Any) -> Any:
        if isinstance(key, Record | type):
            raise pickle.UnpicklingError("a key is not a plain value")
        return key

    def _of_record(self, name: str, record: Record) -> Any:
        if name in _TENSOR:
            return self._storages.tensor(None, *record.args[:4])
        if name == _OTHER_TENSOR:
            return self._storages.tensor(record.args[6], *record.args[:4])
        if name in _PARAMETER:
            return self.of(record.args[0])
        if name == _SUBCLASS:  # a tensor with attributes
            kind, _, args, *_ = record.args
            return self._of_record(kind.name, kind(*args))
        if name == _NAMESPACE:
            return self.of(record.state)
        if name in _PLAIN:
            return _PLAIN[name](*self.of(record.args))
        raise pickle.UnpicklingError(f"it names {name}, but does not use it")


def load(file: BinaryIO) -> Any:
    """Return the content of a file of ``torch.save``: plain values, and tensors on the CPU.

    An ``OrderedDict`` becomes a dict, a parameter a tensor, a namespace the dict of its names.
    ``UnpicklingError`` if the file names anything else, ``ValueError`` if it is damaged or no such
    file.
    """
    try:
        return _load(file)
    except (pickle.UnpicklingError, OSError, MemoryError):
        raise
    except Exception as error:  # a dozen kinds, of whatever a damaged file leads to
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(text) from error


def open_archive(file: BinaryIO) -> zipfile.ZipFile:
    """Open a zip whose records are not compressed, as ``torch.save`` writes it.

    ``ValueError`` or ``BadZipFile`` for another kind: 2 MB may expand to terabytes.
    """
    archive, num_bytes = zipfile.ZipFile(file), file.seek(0, io.SEEK_END)
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("its records are compressed, which torch.save does not do")
    if sum(record.file_size for record in records) > num_bytes:
        raise ValueError("its records claim more bytes than the file has")
    return archive


def _load(file: BinaryIO) -> Any:
    storages = _Storages(file.seek(0, io.SEEK_END))
    file.seek(0)
    content = (_read_archive if zipfile.is_zipfile(file) else _read_old)(file, storages)
    return _Contents(storages).of(content)


def _read_archive(file: BinaryIO, storages: _Storages) -> Any:
    with open_archive(file) as archive:
        root = next(name for name in archive.namelist() if name.endswith("/data.pkl"))[:-9]
        order = f"{root}/byteorder"
        if order in archive.namelist() and archive.read(order) != sys.byteorder.encode():
            raise ValueError("it was written by a machine with another byte order")
        pickled = io.BytesIO(archive.read(f"{root}/data.pkl"))
        content = Records(pickled, _KINDS, storages).load()
        for key, storage in storages.by_key.items():
            name = f"{root}/data/{key}"
            if archive.getinfo(name).file_size != storage.num_bytes:
                raise ValueError(f"record {name} is not as large as the pickle claims")
            storage.fill(archive.read(name))
    return content


def _read_old(file: BinaryIO, storages: _Storages) -> Any:
    """Read a file of ``torch.save`` before torch 1.6: five pickles, then the storages."""
    file.seek(0)
    if Records(file, {}).load() != _MAGIC:
        raise ValueError("torch.save did not write it")
    for _ in ("the version of the format", "what the machine was"):
        Records(file, {}).load()
    content = Records(file, _KINDS, storages).load()
    for key in Records(file, {}).load():
        storage = storages.by_key[key]
        count, found = int.from_bytes(file.read(8), "little"), file.read(storage.num_bytes)
        if len(found) != storage.num_bytes or count * storage.dtype.itemsize != len(found):
            raise ValueError(f"storage {key} is not as large as the pickle claims")
        storage.fill(found)
    return content
