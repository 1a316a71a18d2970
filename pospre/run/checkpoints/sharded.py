"""A checkpoint in shards: a folder to which every rank writes its part, with a manifest.

``ep1-ba4/`` holds torch's distributed checkpoint of the tensors of model and optimiser
(``*.distcp``, ``.metadata``), ``rest.pt`` with all else, and ``manifest.json``, written last, with
the size and the SHA-256 of every file: they are compared before a byte is believed, and a folder
without it is no checkpoint.
"""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import State
from composer.utils import dist
from torch import Tensor

from pospre.atomic_file import write_atomic
from pospre.run.checkpoints import tensors
from pospre.run.checkpoints.file import (
    DamagedCheckpoint,
    manifest_of,
    unpickle,
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


def shard(content: dict[str, Any]) -> dict[str, io.BytesIO]:
    """Return this rank's files of a checkpoint, on all ranks together.

    Args:
        content: with tensors that are sharded, or that all ranks have: the first writes those.
    """
    found, rest = _split(content)
    files = tensors.save(found)
    if dist.get_global_rank() == 0:
        files[_REST] = io.BytesIO()
        torch.save(rest, files[_REST])
    return files


def write_shards(files: Mapping[str, io.BytesIO], folder: Path) -> list[Shard]:
    """Write a rank's files into a checkpoint's folder; without a manifest they are none yet.

    Raises:
        OSError: the disk is full, or not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if METADATA in files:
        manifest_of(folder).unlink(missing_ok=True)  # of a checkpoint of an earlier start
    shards = []
    for name, data in files.items():
        content = data.getbuffer()
        write_atomic(folder / name, content)
        shards.append(Shard(name, len(content), hashlib.sha256(content).hexdigest()))
    return shards


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
