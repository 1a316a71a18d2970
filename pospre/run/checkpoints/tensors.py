"""Torch's distributed checkpoint in memory: what it would write to a disk, or read from it.

Its ``.metadata`` is a pickle, which torch's own reader executes; here it makes records of what
describes tensors, which do nothing (see ``torch_file.py``).
"""

import contextlib
import io
import math
import uuid
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem

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


def save(tensors: dict[str, Tensor]) -> dict[str, io.BytesIO]:
    """Return this rank's files, on all ranks together.

    Args:
        tensors: sharded ones, or ones that all ranks have, which the first one writes.
    """
    files: dict[str, io.BytesIO] = {}
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        dcp.save(
            tensors,
            storage_writer=_Writer(files),
            planner=dcp.DefaultSavePlanner(
                flatten_state_dict=False, dedup_save_to_lowest_rank=True
            ),
            no_dist=dist.get_world_size() == 1,
        )
    return files


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


class _Stream(io.BytesIO):
    """Keeps what was written when its writer closes it."""

    def close(self) -> None:
        pass


class _Memory(filesystem.FileSystem):
    """Files in memory, by name, for torch's writer."""

    def __init__(self, files: Any) -> None:
        self.files = files

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        self.files[Path(path).name] = _Stream()
        yield self.files[Path(path).name]

    def rename(self, path: Any, new_path: Any) -> None:
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def mkdir(self, path: Any) -> None:
        pass

    def exists(self, path: Any) -> bool:
        return Path(path).name in self.files


class _Writer(dcp.FileSystemWriter):
    """Writes into memory, under names that no other save has.

    So a file of this name and size in a bucket is of this save, and not left by an earlier one.
    """

    def __init__(self, files: dict[str, io.BytesIO]) -> None:
        super().__init__("", sync_files=False)
        self.fs = _Memory(files)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        token = uuid.uuid4().hex[:8]
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            plan.storage_data.prefix = token + plan.storage_data.prefix
        return plans

    def storage_meta(self) -> None:  # a path, which would be one more class to read
        return None
