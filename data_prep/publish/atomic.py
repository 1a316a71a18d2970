"""Atomic writing: into a partial folder beside the destination, renamed when complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.publish.locks import WHOLE, locked
from pospre.atomic_file import sync
from pospre.errors import UserError


@contextmanager
def writing(destination: object) -> Iterator[None]:
    """Turn an ``OSError`` inside (disk full, no permission) into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {destination}: {error.strerror or error}. Make room or choose another "
            "destination, then run the same command again."
        ) from error


@contextmanager
def partial_folder(destination: Path) -> Iterator[Path]:
    """Yield a new folder ``<destination>.partial-new`` and remove it at the end, in any case.

    Remains of a killed run for the same destination are removed first.

    Raises:
        UserError: nothing can be written there, or another process is writing it.
    """
    partial = destination.with_name(f"{destination.name}.partial-new")
    lock = destination.with_name(f"{destination.name}.partial.lock")
    with writing(destination), locked(lock, WHOLE, destination):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def replace_folder(complete: Path, destination: Path) -> None:
    """Move a complete folder to the destination; an old one is moved aside, then removed.

    If that fails, the old one is put back. No other process may write the destination meanwhile.
    """
    for path in (*complete.rglob("*"), complete):
        sync(path)
    old = destination.with_name(f"{destination.name}.partial-old")
    shutil.rmtree(old, ignore_errors=True)  # from a killed run
    was_there = destination.exists()
    if was_there:
        destination.rename(old)
    try:
        complete.rename(destination)
    except BaseException:
        if was_there and not destination.exists():
            old.rename(destination)
        raise
    sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def replace_pair(first: tuple[Path, Path], second: tuple[Path, Path]) -> None:
    """Rename two files (from, to) that belong together, after flushing them to disk.

    The old second file is removed first, so that a kill in between leaves no mixed pair.
    """
    for source, _ in (first, second):
        sync(source)
    second[1].unlink(missing_ok=True)
    for source, destination in (first, second):
        source.replace(destination)
    sync(second[1].parent)
