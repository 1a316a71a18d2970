"""The files that one rank writes of a checkpoint: all of them, or its shards."""

import contextlib
import copy
import dataclasses
import pickle
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import State
from composer.utils import dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.serialization import get_crc32_options, set_crc32_options

from pospre.run.checkpoints.files import (
    MANIFEST,
    METADATA,
    REST,
    HashedFile,
    Member,
    write_manifest,
    write_member,
)

_PARTS = ("model", "optimizers")


@contextlib.contextmanager
def sharded_state(state: State) -> Iterator[None]:
    """Get from FSDP every rank's shards, instead of the whole state on the first rank."""
    config = state.fsdp_config
    before, config.state_dict_type = config.state_dict_type, "sharded"
    try:
        yield
    finally:
        config.state_dict_type = before


class Staging:
    """Copies states into the CPU's memory, into the same buffers each time (pinned with a GPU).

    A call overwrites what an earlier call returned.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of nested dicts, lists and tuples with everything in them."""
        used: dict[str, Tensor] = {}
        staged: dict[str, Any] = self._copy(state, "", used)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies from the GPU are under way
        self._buffers = used
        return staged

    def _copy(self, value: Any, place: str, used: dict[str, Tensor]) -> Any:
        if isinstance(value, Tensor):
            used[place] = self._buffer(place, value).copy_(value, non_blocking=True)
            return used[place]
        if isinstance(value, dict):
            return {key: self._copy(item, f"{place}/{key}", used) for key, item in value.items()}
        if type(value) in (list, tuple):
            copies = (self._copy(item, f"{place}/{i}", used) for i, item in enumerate(value))
            return type(value)(copies)
        return copy.deepcopy(value)

    def _buffer(self, place: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return buffer


class Written(NamedTuple):
    """The files that a rank has written, and the position of each tensor in them."""

    members: list[Member]
    tensors: dict[MetadataIndex, _StorageInfo]


class Part:
    """The part of a checkpoint that this rank writes: a copy, so that training continues.

    If all ranks write ``together``, as torch's distributed checkpoint plans it, the first of the
    ranks that hold a tensor writes it.
    """

    def __init__(
        self, content: dict[str, Any], staging: Staging, *, together: bool = False
    ) -> None:
        rank = dist.get_global_rank() if together else 0
        found, rest = _split(content)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        planner.set_up_planner(found, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        plans = dist.all_gather_object(plan) if together else [plan]
        plans, self._described = planner.create_global_plan(plans)
        own = {item.index: planner.resolve_data(item) for item in plans[rank].items}
        staged = staging.copy({"tensors": [*own.values()], "rest": None if rank else rest})
        self._tensors: dict[MetadataIndex, Tensor] = dict(zip(own, staged["tensors"], strict=True))
        self._rest = staged["rest"]

    def write(self, folder: Path) -> Written:
        """Write this rank's files into a checkpoint's folder, which has no manifest yet."""
        folder.mkdir(parents=True, exist_ok=True)
        written = Written([], {})
        # names that no other save has: in a bucket such a file is not left by an earlier one
        name = f"{uuid.uuid4().hex[:8]}__{dist.get_global_rank()}_0.distcp"

        def save_tensors(file: HashedFile) -> None:
            for index, tensor in self._tensors.items():
                start = file.size
                torch.save(tensor, file)  # type: ignore[arg-type]
                written.tensors[index] = _StorageInfo(name, start, file.size - start)

        def save_rest(file: HashedFile) -> None:
            torch.save(self._rest, file)  # type: ignore[arg-type]

        if self._rest is not None:
            (folder / MANIFEST).unlink(missing_ok=True)  # of a checkpoint of an earlier start
            written.members.append(write_member(folder / REST, save_rest))
        if self._tensors:
            with _without_crc32():
                written.members.append(write_member(folder / name, save_tensors))
        return written

    def finish(self, folder: Path, parts: Sequence[Written]) -> None:
        """Combine the files of all ranks into a checkpoint, on the first rank."""
        places = {index: info for part in parts for index, info in part.tensors.items()}
        described = pickle.dumps(dataclasses.replace(self._described, storage_data=places))
        metadata = write_member(folder / METADATA, lambda file: file.write(described))
        members = [*chain(*(part.members for part in parts)), metadata]
        write_manifest(folder, members, self._rest.get("versions", {}))


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """Turn torch's own checksums off: the manifest has better ones, in half the time."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _split(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of model and optimiser by their path, and the rest unchanged."""
    tensors: dict[str, Any] = {}

    def without_tensors(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            return value
        rest = {}
        for key, item in value.items():
            if isinstance(item, Tensor):
                tensors[f"{place}/{key}"] = item
            else:
                rest[key] = without_tensors(item, f"{place}/{key}")
        return rest

    state = {
        key: without_tensors(value, key) if key in _PARTS else value
        for key, value in content["state"].items()
    }
    return tensors, {**content, "state": state}
