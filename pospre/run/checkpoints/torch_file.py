"""Tensors in files of ``torch.save``, read without calling anything that these name.

``torch.load`` of torch 2.7 lets a file assign to objects that are no dicts, and trusts its claims
about storages (CVE-2026-24747). Here a pickle makes records, which hold arguments and do nothing.
Tensors are built from them afterwards, and everything else is left out. Each tensor stays within
the bytes of its storage, and all storages together within those of the file.
"""

import io
import math
import pickle
import sys
import zipfile
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from pospre.run.checkpoints.records import Record, RecordDict, Records, plain_key, record_kind

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
_LEAST = 1 << 20  # bytes that tensors may claim in any file: a small one may be expanded
_SHARED = 8  # times the file's length that they may claim: some are the same values
_LARGEST = 1 << 23  # bytes of a pickle: Python takes up to 64 times as much for it
_MOST_DIMENSIONS = 64
_MOST_VALUES, _DEEPEST = 100_000, 20  # of nested dicts; a repeated value counts each time


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
        self.by_key: dict[str | int, _Storage] = {}
        self._claimed, self._viewed = 0, 0

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
        if not len(size) == len(stride) <= _MOST_DIMENSIONS:
            raise ValueError("a tensor has an unknown description")
        storage, numbers = self.by_key[storage.args[0]], (offset, *size, *stride)
        if any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
            raise ValueError("a tensor has an unknown description")
        dtype = dtype or storage.dtype
        width, count = dtype.itemsize, math.prod(size)
        steps = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else -1
        if (offset + steps + 1) * width > storage.num_bytes:
            raise ValueError("a tensor reaches beyond its storage")
        self._viewed += count * width
        if self._viewed > max(_SHARED * self.num_bytes, _LEAST):
            raise ValueError("its tensors claim much more than the whole file")
        values = torch.empty(0, dtype=dtype)
        return values.set_(storage.data.untyped_storage(), offset, size, stride)


_TENSOR = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_OTHER_TENSOR = "torch._utils._rebuild_tensor_v3"
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_LEFT_OUT = (  # harmless, and usual beside tensors
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.torch_version.TorchVersion",
    "torch.device",
    "torch.Size",
    "datetime.timedelta",
    "__builtin__.set",
    "builtins.set",
    "_codecs.encode",
    "__builtin__.bytes",
    "argparse.Namespace",  # MAE's and DINO's files hold the command line of their training
)
_NAMES = (*_TENSOR, _OTHER_TENSOR, *_PARAMETER, _SUBCLASS, *_LEFT_OUT)
_KINDS: dict[str, type] = {
    **{name: record_kind(name) for name in (*_NAMES, *_STORAGES)},
    "collections.OrderedDict": RecordDict,
    "collections.Counter": RecordDict,
}


class _Contents:
    """Converts the records of a pickle to tensors, in the dicts that hold them."""

    def __init__(self, storages: _Storages) -> None:
        self._storages = storages
        self._count = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return the dict or tensor that a replacement in the pickle stands for, else None."""
        self._count += 1
        if self._count > _MOST_VALUES or depth > _DEEPEST:
            raise ValueError(f"it holds more than {_MOST_VALUES} values, or is nested too deeply")
        if isinstance(value, dict):
            pairs = value.pairs() if isinstance(value, RecordDict) else value.items()
            items = {key: self.of(item, depth + 1) for key, item in pairs}
            return {key: item for key, item in items.items() if item is not None}
        return self._made(value.name, value.args, depth) if isinstance(value, Record) else None

    def _made(self, name: str, args: Any, depth: int) -> Any:
        if name in _TENSOR:
            return self._storages.tensor(None, *args[:4])
        if name == _OTHER_TENSOR:
            return self._storages.tensor(args[6], *args[:4])
        if name in _PARAMETER:
            return self.of(args[0], depth + 1)
        if name == _SUBCLASS:  # a tensor with attributes
            kind, _, inner, *_ = args
            return self._made(kind.name, inner, depth + 1)
        return None


def load(file: BinaryIO) -> dict[str | int, Any]:
    """Return the tensors of a file of ``torch.save``, on the CPU, in dicts as they are there.

    An ``OrderedDict`` becomes a dict, and a parameter a tensor; what is neither is left out.
    ``UnpicklingError`` if the file names anything unknown, ``ValueError`` if it is damaged or no
    such file.
    """
    try:
        content = _load(file)
        return content if isinstance(content, dict) else {}
    except (pickle.UnpicklingError, OSError):
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
        with archive.open(f"{root}/data.pkl") as pickled:
            content = Records(_start(pickled), _KINDS, storages).load()
        for key, storage in storages.by_key.items():
            name = f"{root}/data/{key}"
            if archive.getinfo(name).file_size != storage.num_bytes:
                raise ValueError(f"record {name} is not as large as the pickle claims")
            storage.fill(archive.read(name))
    return content


def _start(file: IO[bytes]) -> io.BytesIO:
    """Return as much of a file as pickles may take, in memory: they can claim any size there."""
    return io.BytesIO(file.read(_LARGEST))


def _read_old(file: BinaryIO, storages: _Storages) -> Any:
    """Read a file of ``torch.save`` before torch 1.6: five pickles, then the storages."""
    file.seek(0)
    start = _start(file)
    if Records(start, {}).load() != _MAGIC:
        raise ValueError("torch.save did not write it")
    for _ in ("the version of the format", "what the machine was"):
        Records(start, {}).load()
    content = Records(start, _KINDS, storages).load()
    keys = Records(start, {}).load()
    file.seek(start.tell())
    for key in keys:
        storage = storages.by_key[plain_key(key)]
        count, data = int.from_bytes(file.read(8), "little"), file.read(storage.num_bytes)
        if len(data) != storage.num_bytes or count * storage.dtype.itemsize != len(data):
            raise ValueError(f"storage {key} is not as large as the pickle claims")
        storage.fill(data)
    return content
