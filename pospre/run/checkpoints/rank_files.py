"""The files that one rank writes of a checkpoint: all of them, or its shards."""

import contextlib
import functools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import State
from composer.utils import dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from pospre.run.checkpoints.files import (
    MANIFEST,
    STATE,
    TENSORS,
    HashedFile,
    Member,
    write_manifest,
    write_member,
)
from pospre.run.checkpoints.plain_state import Plain

_ALIGNED = 8  # bytes: where a .safetensors file's data begin
_KINDS = {  # the names of that format
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    """Copies tensors into the CPU's memory, into the same buffers each time (pinned with a GPU).

    A call overwrites what an earlier call returned.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous copies of tensors."""
        self._buffers = {
            name: self._buffer(name, tensor).copy_(tensor, non_blocking=True)
            for name, tensor in tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies from the GPU are under way
        return self._buffers

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return buffer


class Written(NamedTuple):
    """The files that a rank has written, and the shard of each tensor in them, by its name."""

    members: list[Member]
    shards: dict[str, dict[str, Any]]


class Part:
    """The part of a checkpoint that this rank writes: a copy, so that training continues.

    If all ranks write ``together``, each writes its shards, and the first of the ranks that hold
    the same writes it.
    """

    def __init__(
        self, content: Mapping[str, Any], staging: Staging, *, together: bool = False
    ) -> None:
        self._rank = dist.get_global_rank() if together else 0
        self._plain = Plain(content)
        self._versions: dict[str, Any] = content.get("versions", {})
        own = {name: own_shard(each, self._rank) for name, each in self._plain.tensors.items()}
        shards = {name: shard for name, shard in own.items() if shard is not None}
        self._offsets = {name: offset for name, (_, offset) in shards.items()}
        self._tensors = staging.copy({name: tensor for name, (tensor, _) in shards.items()})
        self._plain.tensors.clear()  # training goes on with their memory

    def write(self, folder: Path) -> Written:
        """Write this rank's tensors into a checkpoint's folder, which has no manifest yet."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            (folder / MANIFEST).unlink(missing_ok=True)  # of a checkpoint of an earlier start
        if not self._tensors:
            return Written([], {})
        # a name that no other save has: in a bucket such a file is not left by an earlier one
        name = f"rank{self._rank}-{uuid.uuid4().hex[:8]}{TENSORS}"
        member = write_member(
            folder / name, functools.partial(write_tensors, tensors=self._tensors)
        )
        shards = {
            key: {"file": name, "offset": self._offsets[key], "size": list(tensor.shape)}
            for key, tensor in self._tensors.items()
        }
        return Written([member], shards)

    def finish(self, folder: Path, parts: Sequence[Written]) -> None:
        """Combine the files of all ranks into a checkpoint, on the first rank."""
        for part in parts:
            for name, shard in part.shards.items():
                self._plain.described[name]["shards"].append(shard)
        text = self._plain.text()
        state = write_member(folder / STATE, lambda file: file.write(text))
        members = [*chain(*(part.members for part in parts)), state]
        write_manifest(folder, members, self._versions)


def own_shard(tensor: Tensor, rank: int) -> tuple[Tensor, list[int]] | None:
    """Return what a rank writes of a tensor, and where that begins in it; None: nothing."""
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return None if rank else (tensor, offset)
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return None
    for axis, (coordinate, placement) in enumerate(
        zip(coordinates, tensor.placements, strict=True)
    ):
        if isinstance(placement, Shard):  # as torch.chunk divides, along one axis of the mesh
            whole = size[placement.dim]
            length = -(-whole // mesh.size(axis))
            begin = min(length * coordinate, whole)
            offset[placement.dim] += begin
            size[placement.dim] = min(length, whole - begin)
        elif coordinate > 0:  # another rank has the same
            return None
    local = tensor.to_local()
    assert list(local.shape) == size, f"a shard is {list(local.shape)}, not {size}"
    return None if local.numel() == 0 < tensor.numel() else (local, offset)


def write_tensors(file: HashedFile, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors in the format of safetensors, without a copy of them in memory."""
    # the widest first, so that each is aligned
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        kind = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
