"""Checkpoints written, looked at and spoilt by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pospre.run.checkpoints.rank_files import Part, Staging


def write_checkpoint(content: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint as one rank does."""
    part = Part(content, Staging())
    part.finish(folder, [part.write(folder)])


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder, by their paths in it."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def shard(checkpoint: Path) -> Path:
    """Return the file with the tensors that one rank has written."""
    (path,) = checkpoint.glob("*.distcp")
    return path


def flip(path: Path, place: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Put other content into a checkpoint's file, and make the manifest fit."""
    (checkpoint / name).write_bytes(content)
    manifest = checkpoint / "manifest.json"
    noted = json.loads(manifest.read_text())
    for item in noted["files"]:
        if item["file"] == name:
            item |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(noted))
