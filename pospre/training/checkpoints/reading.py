"""Which checkpoint is the newest that is whole, and its content.

A checkpoint is one file ``ep<epoch>-ba<batch>.pt``, locally or on S3. It is read once, into memory:
the bytes that were checked are the bytes that are loaded, whatever becomes of the file meanwhile.
"""

import contextlib
import hashlib
import io
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer.utils import dist

from pospre.errors import UserError
from pospre.object_store import Bucket, is_remote
from pospre.recipe.recipe import Recipe, recorded_recipe
from pospre.recipe.yaml_text import read_mapping
from pospre.training.checkpoints.file import (
    DamagedCheckpoint,
    manifest_of,
    unpickle,
    verify,
)
from pospre.training.checkpoints.versions import warn_of_other_versions
from pospre.training.ranks import from_rank_zero

_NAME = re.compile(r"ep(\d+)-ba(\d+)\.pt")


class Found(NamedTuple):
    """A checkpoint file by progress: the greater, the newer; a local one before the same on S3."""

    batch: int
    epoch: int
    is_local: bool
    uri: str


class Checkpoint(NamedTuple):
    """A checkpoint that was read and is whole.

    Attributes:
        uri: where it came from.
        sha256: of the bytes that were read.
        content: what they hold.
    """

    uri: str
    sha256: str
    content: dict[str, Any]

    @property
    def batch(self) -> int:
        """How many steps it has been trained."""
        return int(self.content["state"]["timestamp"]["Timestamp"]["batch"])


def checkpoint_folders(recipe: Recipe) -> list[str]:
    """Return the folders of a run's checkpoints: on this machine and, if it has one, its bucket."""
    return list(dict.fromkeys([str(recipe.local_checkpoints()), recipe.checkpoint_folder()]))


def checkpoints_in(*folders: str) -> list[Found]:
    """Return the checkpoints of local or ``s3://`` folders, newest first."""
    found = []
    for folder in folders:
        if is_remote(folder):
            with Bucket(folder) as bucket:
                found += _named(list(bucket.list()), folder)
        else:
            found += _named([path.name for path in Path(folder).glob("*.pt")], folder)
    return sorted(found, reverse=True)


def _named(names: list[str], folder: str) -> list[Found]:
    return [
        Found(
            int(match[2]), int(match[1]), not is_remote(folder), f"{folder.rstrip('/')}/{match[0]}"
        )
        for match in filter(None, map(_NAME.fullmatch, names))
    ]


def checkpoints_of(recipe: Recipe) -> list[Found]:
    """Return the checkpoints of a run, wherever they are, newest first."""
    return checkpoints_in(*checkpoint_folders(recipe))


def open_newest(folders: Sequence[str]) -> Checkpoint | None:
    """Return the newest whole checkpoint of some folders, None where there is none at all.

    Damaged ones are named and passed over.

    Raises:
        UserError: there are checkpoints, and none is whole.
    """
    failures: list[UserError] = []
    for found in checkpoints_in(*folders):
        try:
            return read_checkpoint(found.uri)
        except DamagedCheckpoint as error:
            failures.append(error)
            print(f"warning: {error}; passed over", file=sys.stderr, flush=True)
    if failures:
        raise UserError(
            f"no checkpoint in {' or '.join(folders)} can be used: {failures[0]}. Bring one back "
            "from a copy, or delete them to start again"
        )
    return None


def remove_checkpoints(folder: str) -> None:
    """Delete the checkpoints of a local or ``s3://`` folder."""
    if is_remote(folder):
        with Bucket(folder) as bucket:
            remove_oldest(bucket, 0)
        return
    for found in checkpoints_in(folder):
        manifest_of(Path(found.uri)).unlink(missing_ok=True)
        Path(found.uri).unlink()


def remove_oldest(bucket: Bucket, keep: int, newest: str | None = None) -> None:
    """Delete the oldest checkpoints of a bucket's folder, each after its manifest.

    Args:
        bucket: of the folder; in use.
        keep: how many stay.
        newest: the name of the one that counts as the newest; what is further stays as well.
    """
    found = sorted(_named(list(bucket.list()), bucket.uri), reverse=True)
    names = [Path(checkpoint.uri).name for checkpoint in found]
    for name in names[(names.index(newest) if newest else 0) + keep :]:
        bucket.delete(manifest_of(Path(name)).name)
        bucket.delete(name)


def read_checkpoint(uri: str) -> Checkpoint:
    """Return one checkpoint file, verified; nothing in it is ever executed.

    Raises:
        DamagedCheckpoint: it is not what training wrote.
        UserError: it is missing, cannot be fetched, or is not one of this package.
    """
    data, manifest = _read(uri)
    sha256 = verify(data, manifest, uri)
    return Checkpoint(uri, sha256, unpickle(data, uri))


def read_on_every_rank(start: Checkpoint | None) -> dict[str, Any] | None:
    """Return on every rank the content of the checkpoint that rank 0 has read.

    Each rank reads the bytes itself, from one download for each node, and compares their SHA-256
    with that of rank 0's.

    Args:
        start: on rank 0 the checkpoint, if there is one; None on the other ranks.

    Raises:
        UserError: on all ranks, if one of them finds other bytes, or none.
    """
    noted = from_rank_zero(lambda: None if start is None else (start.uri, start.sha256))
    if noted is None:
        return None
    content, failure = None if start is None else start.content, ""
    with _on_this_node(noted[0]) as path:
        try:
            content = content or _read_same(path, *noted)
        except UserError as error:
            failure = str(error)
        failures: list[Any] = list(filter(None, dist.all_gather_object(failure)))
    if failures:
        raise UserError(failures[0])
    return content


@contextlib.contextmanager
def _on_this_node(uri: str) -> Iterator[Path]:
    """Give the ranks of a node one local file; a download is deleted in the end."""
    if not is_remote(uri):
        yield Path(uri)
    elif dist.get_world_size() == 1:
        yield Path()  # it was read already
    else:
        with contextlib.ExitStack() as stack:
            folder = None
            if dist.get_local_rank() == 0:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pospre-"))
                with Bucket(uri) as bucket, (Path(folder) / "checkpoint").open("wb") as file:
                    bucket.download(file)
            first = dist.get_global_rank() - dist.get_local_rank()
            folders: list[Any] = dist.all_gather_object(folder)
            yield Path(folders[first]) / "checkpoint"


def _read_same(path: Path, uri: str, sha256: str) -> dict[str, Any]:
    try:
        data = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{uri}, from which the first rank goes on, cannot be read on {socket.gethostname()} "
            f"({error.strerror}). All nodes must see one trainer.save_folder, or use a bucket"
        ) from error
    found = hashlib.sha256(data.getbuffer()).hexdigest()
    if found != sha256:
        raise UserError(
            f"{uri} holds other bytes on {socket.gethostname()} than the first rank has read "
            f"(SHA-256 {found[:12]}…, there {sha256[:12]}…). All nodes must see one "
            "trainer.save_folder, or use a bucket"
        )
    return unpickle(data, uri)


def _read(uri: str) -> tuple[io.BytesIO, bytes | None]:
    """Return the bytes of a checkpoint file and of its manifest, where it has one."""
    if is_remote(uri):
        folder, _, name = uri.rpartition("/")
        data = io.BytesIO()
        with Bucket(uri) as bucket:
            bucket.download(data)
        with Bucket(folder) as bucket:
            return data, bucket.find(manifest_of(Path(name)).name)
    path = Path(uri)
    try:
        manifest = manifest_of(path)
        return io.BytesIO(path.read_bytes()), manifest.read_bytes() if manifest.exists() else None
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {uri} does not exist") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{uri} cannot be read: {error}") from error


def open_checkpoint(uri: str) -> Checkpoint:
    """Return the checkpoint that ``uri`` means: a file, or the newest of a folder or a run folder.

    Raises:
        UserError: there is none, or none that is whole.
    """
    checkpoint = _find(uri)
    warn_of_other_versions(checkpoint.content, checkpoint.uri)
    return checkpoint


def _find(uri: str) -> Checkpoint:
    if uri.endswith(".pt") or (not is_remote(uri) and Path(uri).is_file()):
        return read_checkpoint(uri)
    folders = [uri, f"{uri.rstrip('/')}/checkpoints"]
    recipe_file = Path(uri) / "recipe.yaml"
    if not is_remote(uri) and recipe_file.is_file():
        folders += checkpoint_folders(recorded_recipe(read_mapping(recipe_file)))
    newest = open_newest(folders)
    if newest is not None:
        return newest
    if not is_remote(uri) and not Path(uri).exists():
        raise UserError(f"checkpoint {uri} does not exist")
    raise UserError(f"{uri} holds no checkpoint (ep<epoch>-ba<batch>.pt)")
