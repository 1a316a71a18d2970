"""The files of a checkpoint: a folder with a manifest, written last.

``ep1-ba4/`` holds torch's distributed checkpoint of the model's and the optimiser's tensors
(``*.distcp``, ``.metadata``), ``rest.pt`` with everything else, and ``manifest.json``. The manifest
has the size and SHA-256 of every file, and the versions that wrote them. A folder without one is
no checkpoint. Readers compare size and SHA-256 before they use a byte.
"""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pospre.atomic_file import atomic_open, flush, nearest_existing, sync, write_atomic
from pospre.data.memory import readable
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

MANIFEST = "manifest.json"
METADATA = ".metadata"
REST = "rest.pt"
_NAME = re.compile(rf"{re.escape(METADATA)}|{re.escape(REST)}|\w+\.distcp")


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
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write some bytes."""
        self.hash.update(data)
        self.size += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Flush the file; torch calls this at the end."""
        self.file.flush()


def write_member(path: Path, save: Callable[[HashedFile], Any]) -> Member:
    """Write a file that appears under its name only when it is complete.

    Args:
        path: of the file.
        save: writes into it.

    Raises:
        OSError: the disk is full or not writable; an earlier file of this name is unchanged.
    """
    with atomic_open(path) as file:
        hashed = HashedFile(file)
        try:
            save(hashed)
        except RuntimeError:  # how torch ends when the disk was full, without saying so
            if hashed.failure is None:
                raise
            raise hashed.failure from None
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
    """Return the files of a checkpoint.

    Raises:
        DamagedCheckpoint: the manifest is not valid.
    """
    try:
        members = [
            Member(str(item["file"]), int(item["bytes"]), str(item["sha256"]))
            for item in parse_object(manifest)["files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{name}: its manifest is damaged") from error
    names = {member.file for member in members}
    if not {METADATA, REST} <= names or not all(map(_NAME.fullmatch, names)):
        raise DamagedCheckpoint(f"{name}: its manifest is damaged")
    return members


def verify(files: Mapping[str, bytes], name: str) -> None:
    """Compare the files of a checkpoint with its manifest, which is among them.

    Raises:
        DamagedCheckpoint: a file differs from what was written.
    """
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


def why_not_written(error: OSError, place: Path) -> str:
    """Return why a folder could not be written, and the remedy."""
    if error.errno == errno.EFBIG:
        return f"{error.strerror}. Raise this shell's limit on the size of files (ulimit -f)"
    try:
        there = nearest_existing(place)
        free = f"{readable(shutil.disk_usage(there).free)} free in {there}"
    except OSError:  # the disk is gone, or its server
        free = f"{place} does not answer"
    return f"{error.strerror} ({free}). Make room there, or make it writable"
