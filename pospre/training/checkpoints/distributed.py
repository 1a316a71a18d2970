"""Torch's distributed checkpoint in memory: what it would write to a disk, or read from it.

Its ``.metadata`` is a pickle, which torch's own reader executes; here it may hold the classes that
describe tensors, and nothing else.
"""

import contextlib
import io
import math
import pickle
import uuid
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

METADATA = ".metadata"
_DESCRIPTIONS = {
    (found.__module__, found.__qualname__): found
    for found in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata.ChunkStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
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
    except (Exception, dcp.CheckpointException) as error:  # a dozen kinds; the last is no Exception
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _load(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    described = _Descriptions(io.BytesIO(files[METADATA])).load()
    entries = described.state_dict_metadata
    sizes = {key: (entry.size, entry.properties.dtype) for key, entry in entries.items()}
    if sum(math.prod(size) * dtype.itemsize for size, dtype in sizes.values()) > sum(
        map(len, files.values())
    ):
        raise ValueError("more is described than there is")
    tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in sizes.items()}
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        dcp.load(
            tensors,
            storage_reader=_Reader(files, described),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    return tensors


class _Descriptions(pickle.Unpickler):
    """Reads ``.metadata``: what describes tensors, and nothing that does anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DESCRIPTIONS:
            return _DESCRIPTIONS[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} describes no tensor")


class _Stream(io.BytesIO):
    """Keeps what was written when its writer closes it."""

    def close(self) -> None:
        pass


class _Memory(filesystem.FileSystem):
    """Files in memory, by name, for torch's writer and reader."""

    def __init__(self, files: Any) -> None:
        self.files = files

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        if mode == "wb":
            self.files[Path(path).name] = _Stream()
            yield self.files[Path(path).name]
        else:
            yield io.BytesIO(self.files[str(path)])

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


class _Reader(dcp.FileSystemReader):
    """Reads from memory."""

    def __init__(self, files: Mapping[str, bytes], described: metadata.Metadata) -> None:
        super().__init__("")
        self.fs = _Memory(files)
        self.described = described

    def read_metadata(self) -> metadata.Metadata:
        return self.described
