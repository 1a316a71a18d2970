"""The file of a checkpoint: written whole, with a manifest; read only if it is what was written.

``ep1-ba4.pt`` is what ``torch.save`` makes; ``ep1-ba4.json`` beside it is written last and holds
the file's size and SHA-256, which a reader compares before it uses a byte, and the versions
that wrote it. A file without one, such as a copy that somebody sent, is judged by the checksums of
the zip archive that it is.
"""

import errno
import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pospre.atomic_file import atomic_open, flush, nearest_existing, write_atomic
from pospre.data.memory import readable
from pospre.errors import UserError
from pospre.run.checkpoints import torch_file
from pospre.untrusted_json import parse_object

MANIFEST = "manifest.json"
"""The manifest in a folder of shards."""


class DamagedCheckpoint(UserError):
    """The file is not what training wrote; another one may be whole."""


def manifest_of(path: Path) -> Path:
    """Return where the manifest of a checkpoint lies: beside a file, or in a folder of shards."""
    return path.with_suffix(".json") if path.suffix == ".pt" else path / MANIFEST


def write_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint and its manifest; under their names nothing incomplete ever shows.

    Raises:
        OSError: the disk is full, or not writable; an earlier file of this name is as it was.
    """
    manifest = manifest_of(path)

    def save(file: HashedFile) -> None:
        file.save(content)
        manifest.unlink(missing_ok=True)  # an older one would belie the new file

    size, sha256 = write_hashed(path, save)
    noted = {
        "file": path.name,
        "bytes": size,
        "sha256": sha256,
        "versions": content.get("versions", {}),
    }
    write_atomic(manifest, json.dumps(noted).encode())


def write_hashed(path: Path, save: Callable[["HashedFile"], Any]) -> tuple[int, str]:
    """Write a file that shows under its name when it is whole; return its size and SHA-256.

    Args:
        path: of the file.
        save: writes into it.

    Raises:
        OSError: the disk is full, or not writable; an earlier file of this name is as it was.
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
    return hashed.size, hashed.hash.hexdigest()


def verify(data: bytes, manifest: bytes | None, name: str) -> str:
    """Return the SHA-256 of a checkpoint's bytes, if they are those that were written.

    Args:
        data: the whole file.
        manifest: the content of its manifest, None for a file without one.
        name: what to call it in errors.

    Raises:
        DamagedCheckpoint: they are not.
    """
    found = hashlib.sha256(data).hexdigest()
    if manifest is not None:
        try:
            noted = parse_object(manifest)
            size, expected = int(noted["bytes"]), str(noted["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(f"{name}: its manifest is damaged") from error
        if found != expected:
            raise DamagedCheckpoint(
                f"{name} is damaged: its SHA-256 is not the one in its manifest "
                f"({len(data)} bytes, {size} were written)"
            )
        return found
    try:
        with torch_file.open_archive(io.BytesIO(data)) as archive:
            broken = archive.testzip()
    except Exception as error:  # zipfile raises a dozen kinds for bytes that make no sense
        raise DamagedCheckpoint(
            f"{name} is no checkpoint, or one cut short ({len(data)} bytes)"
        ) from error
    if broken is not None:
        raise DamagedCheckpoint(f"{name} is damaged: {broken} in it has another checksum")
    return found


def unpickle(data: bytes, name: str) -> dict[str, Any]:
    """Return the content of a checkpoint's bytes on the CPU; nothing in it is ever executed.

    Raises:
        DamagedCheckpoint: it cannot be read, or holds more than plain data and tensors.
        UserError: it is no checkpoint of this package.
    """
    try:
        content = torch_file.load(io.BytesIO(data))
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint(
            f"{name} is no checkpoint of pospre.train: it holds more than plain data and tensors "
            f"({error}; nothing in it was executed)"
        ) from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{name} is damaged or no checkpoint ({error})") from error
    if not isinstance(content, dict) or "RecipeRecord" not in callback_states(content):
        raise UserError(
            f"{name} is no checkpoint of pospre.train (it holds no recipe). Of a training of your "
            "own save the encoder alone, torch.save(model.timm_state(), 'encoder.pth'), and not as "
            ".pt, which is for checkpoints."
        )
    return content


def callback_states(content: dict[str, Any]) -> dict[str, Any]:
    """Return what callbacks have stored in a checkpoint's content."""
    state = content.get("state")
    return state.get("callbacks", {}) if isinstance(state, dict) else {}


def why_not_written(error: OSError, place: Path) -> str:
    """Return why something could not be written to a folder, and what helps."""
    if error.errno == errno.EFBIG:
        return f"{error.strerror}. Raise this shell's limit on the size of files (ulimit -f)"
    try:
        there = nearest_existing(place)
        free = f"{readable(shutil.disk_usage(there).free)} free in {there}"
    except OSError:  # the disk is gone, or its server
        free = f"{place} does not answer"
    return f"{error.strerror} ({free}). Make room there, or make it writable"


class HashedFile:
    """A file that is counted and hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.size = 0
        self.failure: OSError | None = None

    def save(self, content: Any) -> None:
        """Write what ``torch.save`` makes of something."""
        torch.save(content, self)  # type: ignore[arg-type]

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
        """Do what torch asks for at the end."""
        self.file.flush()
