"""Reads the content of a checkpoint: the newest intact one, or one by its name.

A checkpoint is a folder ``ep<epoch>-ba<batch>``, local or on S3. It is read into memory once: the
bytes that were checked are the bytes that are loaded, even if the files change meanwhile.
"""

import contextlib
import hashlib
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer.utils import dist

from pospre.collectives import from_rank_zero, however_long, on_every_rank
from pospre.data.memory import available_memory, readable
from pospre.errors import Unreachable, UserError
from pospre.object_store import Bucket, Garbled, is_remote, patiently, s3_patience
from pospre.recipe.recipe import recorded_recipe
from pospre.recipe.yaml_text import VARIABLE, read_mapping
from pospre.run.checkpoints.content import assemble, check_state
from pospre.run.checkpoints.files import (
    LARGEST_MANIFEST,
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    read_manifest,
    warn_of_other_versions,
    why_not_written,
)
from pospre.run.checkpoints.folders import BEST, NAME, NOTE, checkpoints_in, named_best
from pospre.scratch import scratch
from pospre.untrusted_json import parse_object

_OF_JSON = 34  # times its bytes that the values of a JSON take in memory, at most
_ONE_FOLDER = "All nodes must see the same trainer.save_folder; or use a bucket"


class Checkpoint(NamedTuple):
    """A checkpoint that was read and is intact."""

    uri: str  # where it came from
    sha256: str  # of its manifest, which has those of the other files
    content: dict[str, Any]  # of its files
    # the bytes by file, if they came from a bucket and other ranks of this node need them
    files: dict[str, bytes] | None = None

    @property
    def batch(self) -> int:
        """Number of steps that it was trained for."""
        return int(self.content["state"]["timestamp"]["Timestamp"]["batch"])


def open_newest(folders: Sequence[str]) -> Checkpoint | None:
    """Return the newest intact checkpoint of some folders, None if they hold none at all.

    Damaged ones are reported and skipped; ``UserError`` if all are.
    """
    failures: list[UserError] = []
    for checkpoint in checkpoints_in(*folders):
        try:
            return read_checkpoint(checkpoint.uri)
        except DamagedCheckpoint as error:
            failures.append(error)
            print(f"warning: {error}; passed over", file=sys.stderr, flush=True)
    if failures:
        raise UserError(
            f"no checkpoint in {' or '.join(folders)} can be used: {failures[0]}. Restore one "
            "from a copy, or delete them to start again"
        )
    return None


def read_checkpoint(uri: str) -> Checkpoint:
    """Return one checkpoint, verified; no part of it is executed.

    ``DamagedCheckpoint`` if it cannot be read, is not one of this package, or differs from what
    training wrote; ``Unreachable`` if its bucket does not answer.
    """
    try:
        return _read(uri)
    except (DamagedCheckpoint, Garbled):
        if not is_remote(uri):
            raise
    try:
        return _read(uri)  # bits may have changed on the way
    except Garbled as error:
        raise DamagedCheckpoint(str(error)) from error


def _read(uri: str) -> Checkpoint:
    try:
        files = _files_of(uri)
    except Unreachable:
        raise
    except UserError as error:  # as a bucket refuses an object
        raise DamagedCheckpoint(str(error)) from error
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or "it does not fit into the memory"
        raise DamagedCheckpoint(f"{uri} cannot be read: {why}") from error
    content = assemble(files, uri)
    check_state(content, uri)
    is_shared = is_remote(uri) and dist.get_local_world_size() > 1
    sha256 = hashlib.sha256(files[MANIFEST]).hexdigest()
    return Checkpoint(uri, sha256, content, files if is_shared else None)


def recorded_section(uri: str, name: str) -> dict[str, Any] | None:
    """Return a section of the recipe that a checkpoint records, without reading its tensors.

    None if it cannot be read. Nothing is verified: the whole checkpoint is, before it is used.
    """
    try:
        state = _read_files(uri, [STATE], _sizes_in(uri))[STATE]
        recipe = parse_object(state)["content"]["state"]["callbacks"]["RecipeRecord"]["recipe"]
        return dict(recipe[name])
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return None


def read_on_every_rank(start: Checkpoint | None) -> dict[str, Any] | None:
    """Return on every rank the content of the checkpoint ``start`` that rank 0 has read, if any.

    Each rank reads the bytes itself and compares their SHA-256 with rank 0's; if one of them finds
    other bytes, or none, all raise ``UserError``. Every node fetches them from a bucket once; rank
    0 has already done so for the first node.
    """
    noted = from_rank_zero(lambda: None if start is None else (start.uri, start.sha256))
    if noted is None:
        return None
    content = {} if start is None else start.content

    def read_here() -> None:
        if not content:
            content.update(_read_same(local, *noted))

    with _on_this_node(noted[0], None if start is None else start.files) as local:
        on_every_rank(lambda: however_long(read_here))
    return content


@contextlib.contextmanager
def _on_this_node(uri: str, files: dict[str, bytes] | None) -> Iterator[str]:
    """Give the ranks of a node one local copy; a downloaded one is deleted at the end.

    ``files`` are what this rank has read of it; they are emptied when the copy is written.
    """
    if not is_remote(uri) or dist.get_world_size() == 1:  # one process has read it already
        yield uri
    else:
        with contextlib.ExitStack() as stack:

            def fetch() -> str | None:
                is_read = dist.get_global_rank() == 0 and dist.get_local_world_size() == 1
                if dist.get_local_rank() > 0 or is_read:
                    return None
                folder = stack.enter_context(scratch())
                copy = f"{folder}/{Path(uri).name}"
                _copy(uri, Path(copy), files)
                return copy

            copies = on_every_rank(lambda: however_long(fetch))
            yield copies[dist.get_global_rank() - dist.get_local_rank()] or uri


def _copy(uri: str, target: Path, files: dict[str, bytes] | None) -> None:
    """Fetch a checkpoint to this node, unless it has ``files``: from a bucket that may be busy."""
    contents = files or {}
    if not contents:
        patiently(lambda: contents.update(_files_of(uri)), s3_patience())
    try:
        target.mkdir(exist_ok=True)
        for name, content in contents.items():
            (target / name).write_bytes(content)
    except OSError as error:
        raise UserError(
            f"{uri} cannot be copied to {target} on {socket.gethostname()} for the ranks there: "
            f"{why_not_written(error, target)}, or set TMPDIR to another folder"
        ) from error
    contents.clear()


def _read_same(local: str, uri: str, sha256: str) -> dict[str, Any]:
    """Return the content of a local copy if it equals what the first rank read at ``uri``."""
    host = socket.gethostname()
    try:
        checkpoint = read_checkpoint(local)
    except UserError as error:
        raise UserError(
            f"{uri}, from which the first rank resumes, cannot be read on {host} ({error}). "
            f"{_ONE_FOLDER}"
        ) from error
    if checkpoint.sha256 != sha256:
        raise UserError(
            f"{uri} on {host} differs from what the first rank read (SHA-256 "
            f"{checkpoint.sha256[:12]}…, there {sha256[:12]}…). {_ONE_FOLDER}"
        )
    return checkpoint.content


def _files_of(uri: str) -> dict[str, bytes]:
    """Return the content of a checkpoint's files by name, after all sizes have been compared."""
    there = _sizes_in(uri)
    if there.get(MANIFEST, 0) > LARGEST_MANIFEST:
        raise DamagedCheckpoint(f"{uri}: its manifest is damaged: it has {there[MANIFEST]} bytes")
    files = _read_files(uri, [MANIFEST], there)
    members = read_manifest(files[MANIFEST], uri)
    for member in members:
        size = there.get(member.file, member.bytes)
        if size != member.bytes:
            raise DamagedCheckpoint(
                f"{uri} is damaged: {member.file} has {size} bytes, {member.bytes} were written"
            )
    needed = sum(each.bytes * (_OF_JSON if each.file == STATE else 2) for each in members)
    free = available_memory()
    if free is not None and needed > free:
        raise DamagedCheckpoint(
            f"{uri} cannot be read: it may take {readable(needed)}, but {readable(free)} of memory "
            "are available"
        )
    return files | _read_files(uri, [member.file for member in members], there)


def _sizes_in(folder: str) -> dict[str, int]:
    """Return the sizes of the files in a local or ``s3://`` folder by name."""
    if is_remote(folder):
        with Bucket(folder) as bucket:
            return bucket.list()
    with os.scandir(folder) as entries:  # only files: to open a FIFO would take for ever
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _read_files(folder: str, names: list[str], sizes: dict[str, int]) -> dict[str, bytes]:
    """Return the content of files in a folder, no more of each than its size."""
    missing = [name for name in names if name not in sizes]
    if missing:
        raise DamagedCheckpoint(f"{folder} is an incomplete checkpoint: it lacks {missing[0]}")
    if is_remote(folder):
        with Bucket(folder) as bucket:
            return {name: bucket.fetch(name) for name in names}
    contents = {}
    for name in names:
        with (Path(folder) / name).open("rb") as file:
            contents[name] = file.read(sizes[name])
    return contents


def open_checkpoint(uri: str) -> Checkpoint:
    """Return the checkpoint at ``uri``, or the newest intact one of a folder or a run folder."""
    checkpoint = _find(uri)
    warn_of_other_versions(checkpoint.content, checkpoint.uri)
    return checkpoint


def _is_checkpoint(uri: str) -> bool:
    """Return whether an address is that of a checkpoint, by its name or its manifest."""
    if NAME.fullmatch(Path(uri).name):
        return True
    if not is_remote(uri):
        return (Path(uri) / MANIFEST).is_file()
    return MANIFEST in _sizes_in(uri)


def _find(uri: str) -> Checkpoint:
    if not is_remote(uri) and not Path(uri).exists():
        raise UserError(f"checkpoint {uri} does not exist")
    if _is_checkpoint(uri):
        return read_checkpoint(uri)
    folder, _, name = uri.rstrip("/").rpartition("/")
    if is_remote(uri) and name == BEST:
        with Bucket(uri) as bucket:
            best = named_best(bucket.find(NOTE))
        if best is not None:
            return read_checkpoint(f"{folder}/{best}")
    folders = [uri, f"{uri.rstrip('/')}/checkpoints"]
    recipe_file, noted = Path(uri) / "recipe.yaml", None
    if not is_remote(uri) and recipe_file.is_file():
        # where its recipe has them as well; not in runs/NAME, which another may be by now
        noted = recorded_recipe(read_mapping(recipe_file), str(recipe_file)).trainer.save_folder
    newest = open_newest([*folders, *([noted] if noted and not is_remote(noted) else [])])
    if newest is not None:
        return newest
    if noted is not None and (is_remote(noted) or VARIABLE.search(noted)):
        raise UserError(
            f"{uri} holds no checkpoint. Its recipe.yaml names {noted!r}, which pospre does not "
            f"open by itself; if you trust that address, give it instead of {uri}: --model "
            f"{shlex.quote(noted)}, or encoder.weights={shlex.quote(noted)} to train"
        )
    raise UserError(f"{uri} holds no checkpoint (a folder ep<epoch>-ba<batch> with {MANIFEST})")
