"""The tensors of torch's distributed checkpoint, read from the bytes of its files.

Its ``.metadata`` is a pickle, which torch's own reader executes; here it makes records of what
describes tensors, which do nothing (see ``torch_file.py``).
"""

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pospre.run.checkpoints.files import METADATA
from pospre.run.checkpoints.records import Records, record_kind

_LIST = 1 << 12  # bytes at the end of a file in which the list of its records is
_HEADER = 30  # bytes before the names of a record, whose lengths are the last four
_METADATA = "torch.distributed.checkpoint.metadata."
_KINDS: dict[str, type] = {
    name: record_kind(name)
    for name in (
        *(
            _METADATA + kind
            for kind in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
    )
}


def load(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Return the tensors of all ranks' files, whole, on the CPU; nothing is ever executed.

    Raises:
        ValueError: the files are no such checkpoint.
    """
    try:
        return _load(files)
    except Exception as error:  # a dozen kinds, of whatever damaged files lead to
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _load(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    described = Records(io.BytesIO(files[METADATA]), _KINDS).load().state
    tensors: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    kinds = described["state_dict_metadata"]
    for key, entry in kinds.items():
        missing[key] = math.prod(_numbers(entry.state["size"])) * _dtype(entry).itemsize
    if sum(missing.values()) > sum(map(len, files.values())):
        raise ValueError("more is described than there is")
    for index, info in described["storage_data"].items():
        key, start = index.state["fqn"], _numbers(index.state["offset"])
        name, place, length = (info.state[k] for k in ("relative_path", "offset", "length"))
        chunks = (chunk.state for chunk in kinds[key].state["chunks"])
        shape = next(_numbers(c["sizes"]) for c in chunks if _numbers(c["offsets"]) == start)
        part = _tensor(memoryview(files[name])[place : place + length], _dtype(kinds[key]), shape)
        missing[key] -= part.nbytes
        size = _numbers(kinds[key].state["size"])
        if shape == size:
            tensors[key] = part
            continue
        if key not in tensors:
            tensors[key] = torch.zeros(size, dtype=part.dtype)
        target = tensors[key]
        for axis, begin in enumerate(start):
            target = target.narrow(axis, begin, shape[axis])
        target.copy_(part)
    if any(missing.values()):
        raise ValueError("parts are missing")
    return tensors


def _tensor(file: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return the tensor in a file of ``torch.save``, contiguous there, without a second copy.

    The file is a zip that holds the values as they are. Its list of records is at the end. The
    places in that list are relative to what zipfile is given of the file.
    """
    end = file[-_LIST:]
    with zipfile.ZipFile(io.BytesIO(end)) as archive:
        record = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
    place = record.header_offset + len(file) - len(end)
    start = place + _HEADER + sum(struct.unpack_from("<HH", file, place + _HEADER - 4))
    values = file[start : start + record.file_size]
    if len(values) != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor is not as large as it is described")
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = values
    return tensor


def _dtype(entry: Any) -> torch.dtype:
    dtype: torch.dtype = entry.state["properties"].state[0]
    return dtype


def _numbers(size: Any) -> list[int]:
    """Return the numbers of a ``torch.Size``."""
    if not all(type(number) is int and number >= 0 for number in size.args[0]):
        raise ValueError("a size is no size")
    return list(size.args[0])
