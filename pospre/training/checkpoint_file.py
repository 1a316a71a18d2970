"""One checkpoint file on the disk: written whole, with a manifest that says what was written.

``ep1-ba4.pt`` is what ``torch.save`` makes; ``ep1-ba4.json`` beside it is written last and holds
the file's size and SHA-256, which a reader compares before it believes a byte.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

CHECKPOINT_NAME = "ep{epoch}-ba{batch}.pt"
PARTIAL = ".partial"


def manifest_of(path: Path) -> Path:
    """Return where the manifest of a checkpoint file lies."""
    return path.with_suffix(".json")


def write_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint and its manifest; under their names nothing incomplete ever shows.

    Raises:
        OSError: the disk is full, or not writable; an earlier file of this name is as it was.
    """
    partial, manifest = path.with_name(path.name + PARTIAL), manifest_of(path)
    try:
        with partial.open("wb") as file:
            written = _Hashing(file)
            try:
                torch.save(content, written)
            except RuntimeError:  # how torch ends when the disk was full, without saying so
                if written.failure is None:
                    raise
                raise written.failure from None
            _flush(file)
        manifest.unlink(missing_ok=True)  # an older one would belie the new file
        os.replace(partial, path)
        noted = {"file": path.name, "bytes": written.size, "sha256": written.hash.hexdigest()}
        _write_whole(manifest, json.dumps(noted).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class _Hashing:
    """A file for ``torch.save``, hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            _flush(file)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new names, too, outlive a power cut
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
