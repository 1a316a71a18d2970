"""The tensors of torch's distributed checkpoint, read from the bytes of its files.

Its ``.metadata`` is a pickle, which torch's own reader executes; here it makes records of what
describes tensors, which do nothing (see ``torch_file.py``).
"""

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pospre.run.checkpoints import torch_file
from pospre.run.checkpoints.records import Records, record_kind

METADATA = ".metadata"
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
    tensors, missing = {}, {}
    for key, entry in described["state_dict_metadata"].items():
        dtype, size = entry.state["properties"].state[0], _numbers(entry.state["size"])
        missing[key] = math.prod(size) * dtype.itemsize
        if sum(missing.values()) > sum(map(len, files.values())):
            raise ValueError("more is described than there is")
        tensors[key] = torch.zeros(size, dtype=dtype)
    for index, info in described["storage_data"].items():
        key, start = index.state["fqn"], index.state.get("offset")
        name, place, length = (info.state[k] for k in ("relative_path", "offset", "length"))
        part = torch_file.load(io.BytesIO(files[name][place : place + length]))
        target = tensors[key]
        for axis, begin in enumerate(() if start is None else _numbers(start)):
            target = target.narrow(axis, begin, part.shape[axis])
        if target.shape != part.shape or target.dtype != part.dtype:
            raise ValueError(f"{key} has parts of another kind")
        target.copy_(part)
        missing[key] -= part.nbytes
    if any(missing.values()):
        raise ValueError("parts are missing")
    return tensors


def _numbers(size: Any) -> list[int]:
    """Return the numbers of a ``torch.Size``."""
    if not all(type(number) is int and number >= 0 for number in size.args[0]):
        raise ValueError("a size is no size")
    return list(size.args[0])
