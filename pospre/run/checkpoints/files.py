"""The files of a checkpoint: a folder of tensors, a JSON of everything else, and a manifest.

``ep1-ba4/`` holds

- ``rank<rank>-<8 hex digits>.safetensors``: the tensors that a rank wrote. Without FSDP the first
  rank writes all, whole; under FSDP every rank writes its shards. A tensor's name is its path in
  the content, joined by ``/``: ``state/model/encoder.norm.weight``.
- ``state.json``: ``{"content": …, "types": [[path, type], …]}``. ``content`` is the state of
  training, the recipe and the random states. ``types`` lists what JSON has no type for, inner
  values before outer ones; a path is a list of keys and places:

  - ``tensor``: ``{"shape": […], "shards": [{"file": …, "offset": […], "size": […]}, …]}`` with the
    whole shape, and for each shard its file, where it begins in the tensor, and its shape.
  - ``tuple``: a list. ``timedelta``: days, seconds and microseconds. ``float``: nan, inf or -inf.

- ``manifest.json``: ``{"files": [{"file": …, "bytes": …, "sha256": …}, …], "versions": {…}}``: size
  and SHA-256 of every other file, and the versions that wrote them. It is written last; a folder
  without it is no checkpoint.

Readers compare sizes before they read a file, compare SHA-256 before they use a byte, and warn of
other versions. Any number of ranks can read what any other number wrote.
"""

import errno
import functools
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import composer
import torch
from composer.utils import dist

import pospre
from pospre.atomic_file import atomic_open, flush, nearest_existing, sync, write_atomic
from pospre.data.memory import readable
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
LARGEST_MANIFEST = 1 << 24  # bytes: those of a hundred thousand ranks
_NAME = re.compile(rf"{re.escape(STATE)}|rank[0-9]{{1,9}}-[0-9a-f]{{8}}{re.escape(TENSORS)}")
_COMPARED = ("pospre", "revision", "torch", "composer", "python")


class DamagedCheckpoint(UserError):
    """The files of a checkpoint differ from what was written; an older one may be intact."""


class Member(NamedTuple):
    """A file of a checkpoint, as its manifest lists it."""

    file: str
    bytes: int
    sha256: str


class HashedFile:
    """A file that is counted and hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write some bytes."""
        self.hash.update(data)
        self.size += len(data)
        self.file.write(data)


def write_member(path: Path, save: Callable[[HashedFile], Any]) -> Member:
    """Write a file that appears under its name only when it is complete, as ``save`` writes it.

    ``OSError`` leaves an earlier file of this name unchanged.
    """
    with atomic_open(path) as file:
        hashed = HashedFile(file)
        save(hashed)
        flush(file)
    return Member(path.name, hashed.size, hashed.hash.hexdigest())


def write_manifest(folder: Path, members: Sequence[Member], versions: dict[str, Any]) -> None:
    """Turn a folder into a checkpoint, and remove other files from it."""
    noted = {"files": [member._asdict() for member in members], "versions": versions}
    write_atomic(folder / MANIFEST, json.dumps(noted).encode())
    sync(folder.parent)  # the folder's own name, too, outlives a power cut
    names = {MANIFEST, *(member.file for member in members)}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def read_manifest(manifest: bytes, name: str) -> list[Member]:
    """Return the files of a checkpoint; ``DamagedCheckpoint`` if the manifest is not valid."""
    try:
        members = [
            Member(str(item["file"]), int(item["bytes"]), str(item["sha256"]))
            for item in parse_object(manifest)["files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{name}: its manifest is damaged") from error
    names = {member.file for member in members}
    if STATE not in names or not all(map(_NAME.fullmatch, names)):
        raise DamagedCheckpoint(f"{name}: its manifest is damaged")
    return members


def verify(files: Mapping[str, bytes], name: str) -> None:
    """Raise ``DamagedCheckpoint`` if a file differs from the manifest, which is among them."""
    for member in read_manifest(files[MANIFEST], name):
        data = files[member.file]
        if hashlib.sha256(data).hexdigest() != member.sha256:
            raise DamagedCheckpoint(
                f"{name} is damaged: the SHA-256 of {member.file} is not the one in its manifest "
                f"({len(data)} bytes, {member.bytes} were written)"
            )


def files_of(checkpoint: Path) -> list[Path]:
    """Return the files of a local checkpoint, without its manifest."""
    members = read_manifest((checkpoint / MANIFEST).read_bytes(), str(checkpoint))
    return [checkpoint / member.file for member in members]


def why_not_written(error: OSError, folder: Path) -> str:
    """Return why a folder could not be written, and the remedy."""
    if error.errno == errno.EFBIG:
        return f"{error.strerror}. Raise this shell's limit on the size of files (ulimit -f)"
    try:
        there = nearest_existing(folder)
        free = f"{readable(shutil.disk_usage(there).free)} free in {there}"
    except OSError:  # the disk is gone, or its server
        free = f"{folder} does not answer"
    return f"{error.strerror} ({free}). Make room there, or make it writable"


def versions() -> dict[str, str | int | None]:
    """Return the versions of this process, for a checkpoint that is about to be written.

    ``revision`` is the commit of the running checkout, with ``-dirty`` if tracked files differ,
    and None if pospre is installed as a package. ``world_size`` counts the ranks.
    """
    return {
        "pospre": pospre.__version__,
        "revision": revision(Path(pospre.__file__).parent),
        "torch": str(torch.__version__),
        "composer": composer.__version__,
        "python": platform.python_version(),
        "world_size": dist.get_world_size(),
    }


@functools.cache
def revision(package: Path) -> str | None:
    """Return the commit that a package's folder is checked out at, None outside of a checkout.

    A package in an environment within a checkout does not count.
    """
    commands = (
        ("ls-files", "--error-unmatch", "__init__.py"),
        ("rev-parse", "HEAD"),
        ("status", "--porcelain", "--untracked-files=no"),
    )
    try:
        _, commit, changes = (
            subprocess.run(
                ["git", "-C", str(package), *command],
                capture_output=True,
                text=True,
                check=True,
                timeout=20,
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit


def warn_of_other_versions(content: dict[str, Any], uri: str) -> None:
    """Warn if a checkpoint was written by other versions; other numbers of ranks are fine."""
    noted = content.get("versions")
    if not isinstance(noted, dict):
        return
    own = versions()
    differing = [
        f"{key} {str(noted.get(key))[:60]!r} (here {str(own[key])!r})"
        for key in _COMPARED
        if noted.get(key) != own[key]
    ]
    if differing:
        print(
            f"warning: {uri} was written with {', '.join(differing)}; results may differ in "
            "the last bits",
            file=sys.stderr,
            flush=True,
        )
