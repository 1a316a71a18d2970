"""Folders of checkpoints, on disk and in buckets: what they hold, and removal of old ones."""

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from pospre.errors import UserError
from pospre.object_store import Bucket, is_remote
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.files import MANIFEST
from pospre.untrusted_json import parse_object

CHECKPOINT_NAME = "ep{epoch}-ba{batch}"
BEST = "best"
"""The folder, beside the checkpoints, of what ``trainer.keep_best`` keeps."""
NOTE = "figure.json"
"""The file in it that says which checkpoint that is."""
NAME = re.compile(r"ep([0-9]{1,18})-ba([0-9]{1,18})")


class CheckpointAddress(NamedTuple):
    """A checkpoint, ordered by progress: the greatest is the newest; local before S3."""

    batch: int
    epoch: int
    is_local: bool
    uri: str


def checkpoint_folders(recipe: Recipe) -> list[str]:
    """Return the folders of a run's checkpoints: on this machine and, if it has one, its bucket."""
    return list(dict.fromkeys([str(recipe.local_checkpoints()), recipe.checkpoint_folder()]))


def checkpoints_in(*folders: str) -> list[CheckpointAddress]:
    """Return the checkpoints of local or ``s3://`` folders, newest first."""
    checkpoints = []
    for folder in folders:
        if is_remote(folder):
            with Bucket(folder) as bucket:
                checkpoints += _named(list(bucket.list(below=True)), folder)
        else:
            checkpoints += _named([f"{name}/{MANIFEST}" for name in _whole(Path(folder))], folder)
    return sorted(checkpoints, reverse=True)


def _whole(folder: Path) -> list[str]:
    """Return the names of the folders in a local folder that have a manifest.

    One that cannot be looked into counts: its error must not hide the others.
    """

    def is_whole(name: str) -> bool:
        try:
            return (folder / name / MANIFEST).exists()
        except OSError:
            return True

    try:
        return list(filter(is_whole, filter(NAME.fullmatch, os.listdir(folder))))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error


def _named(names: list[str], folder: str) -> list[CheckpointAddress]:
    """Return the checkpoints of a folder: those with a manifest."""
    checkpoints = []
    for name in names:
        checkpoint, _, file = name.partition("/")
        match = NAME.fullmatch(checkpoint)
        if match and file == MANIFEST:
            uri = f"{folder.rstrip('/')}/{checkpoint}"
            checkpoints.append(
                CheckpointAddress(int(match[2]), int(match[1]), not is_remote(folder), uri)
            )
    return checkpoints


def checkpoints_of(recipe: Recipe) -> list[CheckpointAddress]:
    """Return the checkpoints of a run from all its folders, newest first."""
    return checkpoints_in(*checkpoint_folders(recipe))


def remove_checkpoints(folder: str) -> None:
    """Delete the checkpoints of a local or ``s3://`` folder."""
    if is_remote(folder):
        with Bucket(folder) as bucket:
            remove_oldest(bucket, 0)
            bucket.delete(f"{BEST}/{NOTE}")
        return
    for checkpoint in checkpoints_in(folder):
        remove(Path(checkpoint.uri))


def incomplete(folder: Path) -> list[str]:
    """Return the names of incomplete checkpoints that killed saves left in a local folder."""
    paths = [path for path in folder.glob("ep*-ba*") if path.is_dir()]
    return [path.name for path in paths if not (path / MANIFEST).exists()]


def remove(path: Path) -> None:
    """Delete a local checkpoint, complete or not: its manifest first."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)  # other nodes may be at it


def named_best(note: bytes | None) -> str | None:
    """Return the name of the best checkpoint from its note; None if the note is not valid."""
    try:
        name = Path(parse_object(note or b"")["checkpoint"]).name
    except (ValueError, KeyError, TypeError):
        return None
    return name if NAME.fullmatch(name) else None


def remove_oldest(
    bucket: Bucket, keep: int, newest: str | None = None, best: str | None = None
) -> None:
    """Delete the oldest checkpoints of a bucket's folder, the manifest of each first.

    ``keep`` of them stay, ``newest`` being the last that counts: later ones stay as well, and so
    does ``best``. Shards without a manifest, left by killed uploads, are deleted if older than
    ``newest``.
    """
    objects = list(bucket.list(below=True))
    checkpoints = sorted(_named(objects, bucket.uri), reverse=True)
    names = [Path(checkpoint.uri).name for checkpoint in checkpoints]
    index = names.index(newest) if newest else 0
    kept = {*names[: index + keep], best}
    for name in set(names) - kept:
        bucket.delete(f"{name}/{MANIFEST}")
    for part in objects:
        folder, _, file = part.partition("/")
        match = NAME.fullmatch(folder)
        if match and file not in ("", MANIFEST) and folder not in kept:
            progress = int(match[2]), int(match[1])
            if newest is None or progress < checkpoints[index][:2]:
                bucket.delete(part)
