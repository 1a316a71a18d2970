"""A checkpoint in shards: a folder to which every rank writes its part, with a manifest.

``ep1-ba4/`` holds torch's distributed checkpoint of the tensors of model and optimiser
(``*.distcp``, ``.metadata``), ``rest.pt`` with all else, and ``manifest.json``, written last, with
the size and the SHA-256 of every file: they are compared before a byte is used, and a folder
without it is no checkpoint.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import pickle
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
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

from pospre.atomic_file import write_atomic
from pospre.run.checkpoints import tensors
from pospre.run.checkpoints.file import (
    DamagedCheckpoint,
    HashedFile,
    manifest_of,
    unpickle,
    write_hashed,
)
from pospre.run.checkpoints.tensors import METADATA
from pospre.untrusted_json import parse_object

_REST = "rest.pt"
_FILE_NAME = re.compile(r"\.metadata|rest\.pt|\w+\.distcp")
_PARTS = ("model", "optimizers")


class Shard(NamedTuple):
    """A file of a checkpoint, as its manifest lists it."""

    file: str
    bytes: int
    sha256: str


@contextlib.contextmanager
def sharded_state(state: State) -> Iterator[None]:
    """Let FSDP give every rank its shards instead of the whole state to the first one."""
    config = state.fsdp_config
    if config is None:
        yield
        return
    before, config.state_dict_type = config.state_dict_type, "sharded"
    try:
        yield
    finally:
        config.state_dict_type = before


class Staging:
    """Copies states into the CPU's memory: in the same buffers each time, pinned beside a GPU.

    What an earlier call returned is overwritten by the next one.
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
    """What a rank has written of a checkpoint: its files, and where in them the tensors are."""

    shards: list[Shard]
    tensors: dict[MetadataIndex, _StorageInfo]


class Part:
    """What this rank writes of a checkpoint, copied: training may go on while it is written.

    All ranks make theirs together, by the plan of torch's distributed checkpoint.

    Args:
        content: with tensors that are sharded, or that all ranks have: the first writes those.
        staging: what copies it.
    """

    def __init__(self, content: dict[str, Any], staging: Staging) -> None:
        rank = dist.get_global_rank()
        found, rest = _split(content)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        planner.set_up_planner(found, is_coordinator=rank == 0)
        plans = dist.all_gather_object(planner.create_local_plan())
        plans, self._described = planner.create_global_plan(plans)
        own = {item.index: planner.resolve_data(item) for item in plans[rank].items}
        staged = staging.copy({"tensors": [*own.values()], "rest": None if rank else rest})
        self._tensors: dict[MetadataIndex, Tensor] = dict(zip(own, staged["tensors"], strict=True))
        self._rest = staged["rest"]

    def write(self, folder: Path) -> Written:
        """Write this rank's files into a checkpoint's folder; without a manifest they are none yet.

        Raises:
            OSError: the disk is full, or not writable.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written = Written([], {})
        # names that no other save has: in a bucket such a file is not left by an earlier one
        name = f"{uuid.uuid4().hex[:8]}__{dist.get_global_rank()}_0.distcp"

        def save_tensors(file: HashedFile) -> None:
            for index, tensor in self._tensors.items():
                start = file.size
                file.save(tensor)
                written.tensors[index] = _StorageInfo(name, start, file.size - start)

        if self._rest is not None:
            manifest_of(folder).unlink(missing_ok=True)  # of a checkpoint of an earlier start
            rest = write_hashed(folder / _REST, lambda file: file.save(self._rest))
            written.shards.append(Shard(_REST, *rest))
        if self._tensors:
            written.shards.append(Shard(name, *write_hashed(folder / name, save_tensors)))
        return written

    def finish(self, folder: Path, parts: Sequence[Written], versions: dict[str, Any]) -> None:
        """Make a checkpoint of what all ranks have written; on the first rank."""
        places = {index: info for part in parts for index, info in part.tensors.items()}
        described = pickle.dumps(dataclasses.replace(self._described, storage_data=places))
        metadata = write_hashed(folder / METADATA, lambda file: file.write(described))
        shards = [*chain(*(part.shards for part in parts)), Shard(METADATA, *metadata)]
        write_manifest(folder, shards, versions)


def write_manifest(folder: Path, shards: list[Shard], versions: dict[str, Any]) -> None:
    """Make a checkpoint of a folder, and remove from it what is not part of it."""
    listed = [part._asdict() for part in shards]
    noted = json.dumps({"files": listed, "versions": versions})
    write_atomic(manifest_of(folder), noted.encode())
    names = {manifest_of(folder).name, *(part.file for part in shards)}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def read_manifest(manifest: bytes, name: str) -> list[Shard]:
    """Return the files of a checkpoint.

    Raises:
        DamagedCheckpoint: the manifest says nothing of the kind.
    """
    try:
        shards = [
            Shard(str(item["file"]), int(item["bytes"]), str(item["sha256"]))
            for item in parse_object(manifest)["files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{name}: its manifest is damaged") from error
    names = {part.file for part in shards}
    if not {METADATA, _REST} <= names or not all(map(_FILE_NAME.fullmatch, names)):
        raise DamagedCheckpoint(f"{name}: its manifest is damaged")
    return shards


def assemble(files: Mapping[str, bytes], shards: list[Shard], name: str) -> dict[str, Any]:
    """Return the content of a checkpoint, whole, on the CPU; nothing in it is ever executed.

    Args:
        files: all that ``shards`` lists.
        shards: from the manifest.
        name: what to call it in errors.

    Raises:
        DamagedCheckpoint: a file is not what was written, or holds more than plain data.
        UserError: it is no checkpoint of this package.
    """
    for part in shards:
        if hashlib.sha256(files[part.file]).hexdigest() != part.sha256:
            raise DamagedCheckpoint(
                f"{name} is damaged: the SHA-256 of {part.file} is not the one in its manifest "
                f"({len(files[part.file])} bytes, {part.bytes} were written)"
            )
    content = unpickle(files[_REST], f"{name}/{_REST}")
    try:
        for key, tensor in tensors.load(files).items():
            *path, last = key.split("/")
            place = content["state"]
            for step in path:
                place = place.setdefault(step, {})
            place[last] = tensor
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            f"{name} is damaged, or its {METADATA} holds more than what describes tensors "
            "(nothing in it was executed)"
        ) from error
    return content


def _split(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of model and optimiser by their place, and the rest as it was."""
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
