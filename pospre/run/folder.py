"""A run's folder: its owner, a lock for one run at a time, and copies of its files in a bucket."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import yaml
from composer.utils import dist

from pospre.atomic_file import PARTIAL, nearest_existing, write_atomic
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.task_description import PRETEXT_TASKS, to_json
from pospre.object_store import Bucket, is_remote, s3_patience
from pospre.recipe.provenance import annotated
from pospre.recipe.recipe import Recipe
from pospre.recipe.yaml_text import read_mapping
from pospre.run.checkpoints.files import why_not_written
from pospre.run.checkpoints.folders import remove_checkpoints
from pospre.run.checkpoints.reading import open_newest
from pospre.run.lease import lease
from pospre.run.peers.ranks import is_restart
from pospre.run.resume import recorded
from pospre.run.same_recipe import compare_recipes
from pospre.untrusted_json import parse_steps

_HALF_WRITTEN = f"recipe.yaml*{PARTIAL}", f"{PRETEXT_TASKS}*{PARTIAL}"
LOCK = "run.lock"
REFERENCE = "reference.safetensors"
"""The reference's tensors, written once."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_NAMES = ("recipe.yaml", PRETEXT_TASKS, "metrics.jsonl", "watch.jsonl", "report.html")
_FOLDERS = ("evaluation", "bad_steps")
_RESTORED = re.compile(r"watch\.jsonl|evaluation/\w+\.jsonl?")


@contextlib.contextmanager
def hold_run(recipe: Recipe) -> Iterator[None]:
    """Lock a run's folders for this run, on rank 0; ``UserError`` if another run is in one of them.

    The operating system holds the lock and releases it when the process ends, even by ``kill -9``.
    On NFS the server holds it, so it also excludes other machines (unless the mount has ``nolock``
    or ``local_lock``). A lease protects a folder in a bucket (``lease.py``).
    """
    if dist.get_global_rank() > 0:
        yield
        return
    _check_folders(recipe)
    folders = [recipe.run_path()]
    if recipe.trainer.save_folder and not is_remote(recipe.trainer.save_folder):
        folders.append(Path(recipe.trainer.save_folder))
    with contextlib.ExitStack() as stack:
        try:
            for folder in dict.fromkeys(folders):
                stack.enter_context(_locked(folder))
            if is_remote(recipe.checkpoint_folder()):
                stack.enter_context(lease(recipe.checkpoint_folder(), _patience(recipe)))
            yield
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            raise UserError(
                f"run folder {folders[0]} cannot be written: {why_not_written(error, folders[0])}, "
                "and run the command again: it resumes from the last checkpoint, if there is one"
            ) from error


def _patience(recipe: Recipe) -> float:
    """Return how many seconds to wait at the start for a bucket that does not answer.

    A resumed run waits until an outage is over: it may be unattended.
    """
    if not (recipe.run_path() / "recipe.yaml").exists():
        return 0.0  # a new run: its user is present, and the address may be wrong
    if dist.get_world_size() > 1:  # the other ranks wait
        return min(s3_patience(), recipe.trainer.dist_timeout / 2)
    return s3_patience()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; at the end remove it, and the folder if nothing was written."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run folder {folder} cannot be created ({error.strerror}); choose another "
            "trainer.run_folder"
        ) from error
    try:
        with _lock(folder / LOCK):
            try:
                yield
            finally:
                (folder / LOCK).unlink(missing_ok=True)
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _lock(path: Path) -> TextIO:
    """Return the locked file; while it is open no other process can lock it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            with file:
                raise UserError(
                    f"{path.parent} is in use by another run ({file.read().strip()}). Wait until "
                    "it has ended, stop it, or choose another run_name"
                ) from error
        except OSError as error:
            print(
                f"warning: {path.parent} cannot be locked ({error.strerror}): make sure that no "
                "other run uses it",
                file=sys.stderr,
            )
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file
        file.close()  # its holder removed it when it ended: lock the new one


def _check_folders(recipe: Recipe) -> None:
    """Raise a ``UserError`` if one of the run's folders is a file, or not writable."""
    folder = recipe.checkpoint_folder()
    folders = {f"run folder {recipe.run_path()}": recipe.run_path()}
    if not is_remote(folder):
        folders[f"trainer.save_folder {folder}"] = Path(folder)
    for name, wanted in folders.items():
        nearest = nearest_existing(wanted)
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            what = "read-only, or not yours" if nearest.is_dir() else "a file"
            raise UserError(
                f"{name} cannot be written: {nearest} is {what}; make it a writable folder, or "
                "choose another run_name, trainer.run_folder or trainer.save_folder"
            )


def starts_over(recipe: Recipe) -> bool:
    """Return whether to delete an earlier run: a user's command does, an automatic restart not."""
    return recipe.trainer.overwrite and not is_restart()


def clear(recipe: Recipe) -> None:
    """Remove an earlier run of this name, unless files of another run would go with it."""
    path, folder = recipe.run_path(), recipe.checkpoint_folder()
    if not (path / "recipe.yaml").exists() and _strangers(path):
        raise UserError(
            f"{path} is not a run folder (it has no recipe.yaml), so trainer.overwrite does not "
            "delete it"
        )
    newest = open_newest([folder]) if recipe.trainer.save_folder else None
    if newest is not None:
        owner = recorded(newest.content).recipe.get("run_name")
        if owner != recipe.run_name:
            raise UserError(
                f"{newest.uri} belongs to run '{owner}', so trainer.overwrite does not delete it; "
                "choose another trainer.save_folder"
            )
    try:
        remove_checkpoints(folder)
        if is_remote(folder):
            remove_mirrored(folder)
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
    except OSError as error:
        raise UserError(f"trainer.overwrite: the earlier run cannot be deleted: {error}") from error


def _strangers(path: Path) -> list[Path]:
    """Return the entries of a run folder, without leftovers of a failed start and certificates."""
    remains = {*_half_written(path), path / LOCK, path / "certificate"}
    checkpoints = path / "checkpoints"
    if checkpoints.is_dir() and not any(checkpoints.iterdir()):
        remains.add(checkpoints)
    return [entry for entry in path.iterdir() if entry not in remains]


def check_folder(recipe: Recipe) -> None:
    """Raise a ``UserError`` if the run's folder belongs to another run, or is no run folder."""
    path = recipe.run_path()
    if (path / "recipe.yaml").exists():
        compare_recipes(read_mapping(path / "recipe.yaml"), recipe, f"{path}/recipe.yaml")
    elif _strangers(path):
        raise UserError(
            f"{path} exists, but is not a run folder (it has no recipe.yaml); choose another "
            "run_name"
        )


def write_recipe(recipe: Recipe, algorithms: Sequence[PretrainAlgorithm]) -> None:
    """Write the recipe and its pretext tasks into the run's folder, which ``hold`` has made."""
    folder = recipe.run_path()
    asked = {each.module_name(): each.pretext_task for each in algorithms}
    try:
        for killed in _half_written(folder):
            killed.unlink()
        text = annotated(yaml.safe_dump(recipe.record(), sort_keys=False), recipe.environment)
        write_atomic(folder / "recipe.yaml", text.encode())
        write_atomic(folder / PRETEXT_TASKS, to_json(asked))
    except OSError as error:
        raise UserError(
            f"run folder {folder} cannot be written: "
            f"{why_not_written(error, folder)}, and run the command again"
        ) from error


def _half_written(folder: Path) -> list[Path]:
    return [path for pattern in _HALF_WRITTEN for path in folder.glob(pattern)]


def mirror_run(run_folder: Path, remote: Bucket) -> None:
    """Copy a run's small files into its bucket: everything but the checkpoints."""
    paths = [run_folder / name for name in _NAMES]
    for folder in _FOLDERS:
        paths += sorted(path for path in (run_folder / folder).rglob("*") if path.is_file())
    with remote as bucket:
        for path in paths:
            if path.exists() and path.suffix != PARTIAL:
                bucket.put(path.relative_to(run_folder).as_posix(), path.read_bytes())


def remove_mirrored(remote: str) -> None:
    """Delete a run's small files from its bucket."""
    below = tuple(f"{folder}/" for folder in _FOLDERS)
    with Bucket(remote) as bucket:
        for name in bucket.list(below=True):
            if name in (*_NAMES, REFERENCE) or name.startswith(below):
                bucket.delete(name)


def restore_run(run_folder: Path, remote: str) -> None:
    """Fetch a run's measurements if its bucket is ahead of its local folder."""
    target = run_folder / "metrics.jsonl"
    with Bucket(remote) as bucket:
        theirs = bucket.find(target.name)
        ours = target.read_bytes() if target.exists() else b""
        if theirs is None or _last_step(theirs) <= _last_step(ours):
            return
        write_atomic(target, theirs)
        measured = [f"evaluation/{name}" for name in bucket.list("evaluation")]
        for name in filter(_RESTORED.fullmatch, ["watch.jsonl", *measured]):
            content = bucket.find(name)
            if content is not None:
                (run_folder / name).parent.mkdir(exist_ok=True)
                write_atomic(run_folder / name, content)


def _last_step(metrics: bytes) -> int:
    """Return the last step in a metrics file, 0 if there is none."""
    steps = parse_steps(metrics)
    return int(steps[-1]["step"]) if steps else 0
