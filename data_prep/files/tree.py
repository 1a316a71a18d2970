"""A data set's files by name, unpacked or still in zips."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import is_zipfile

from data_prep.files.archives import Entry, InFile, Missing, zip_entries
from pospre.data.stores.files import is_visible, names_in, odd_file, refuse_unlisted
from pospre.data.stores.image_folder import visible_files
from pospre.data.stores.splits import split_of_name
from pospre.errors import UserError
from pospre.text_lists import decode_text, text_lines
from pospre.untrusted_json import parse_json

_BUNDLES = ("data", "shards")


class Tree:
    """The files of a data set by their unpacked names.

    ``root`` may be a folder or a zip. Zips directly in a folder count as unpacked there (as COCO
    and others are distributed). If there is only one folder at the top, as in most archives, names
    start inside it. Any other file counts as an empty folder.
    """

    def __init__(self, root: Path, *, skip_damaged: bool = False) -> None:
        """Open the tree; with ``skip_damaged``, ignore damaged zips in the folder."""
        self.root = root
        self._skip_damaged = skip_damaged
        self._folder = _inmost(root) if root.is_dir() else None

    def find(self, name: str) -> Entry | None:
        """Return the file of this name, or None; names may not lead out of the tree."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            return None
        if self._folder is not None:
            file = self._folder / name
            if file.is_file():
                return _file_entry(file, name)
        return self._packed.get(name)

    def listed(self, name: str) -> Entry:
        """Return the file of a listed name, even if it does not exist."""
        return self.find(name) or Entry(name, 0, "missing", Missing())

    def below(self, prefix: str) -> list[Entry]:
        """Return all visible files below a folder, sorted by name."""
        entries = {
            name: entry for name, entry in self._packed.items() if name.startswith(f"{prefix}/")
        }
        if self._folder is not None and (self._folder / prefix).is_dir():
            names = (f"{prefix}/{name}" for name in visible_files(self._folder / prefix))
            entries |= {name: _file_entry(self._folder / name, name) for name in names}
        return [entries[name] for name in sorted(entries)]

    def has(self, folder: str) -> bool:
        """Return whether this folder exists."""
        if self._folder is not None and (self._folder / folder).is_dir():
            return True
        return any(name.startswith(f"{folder}/") for name in self._packed)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder, sorted."""
        prefix = f"{folder}/" if folder else ""
        inside = (name[len(prefix) :] for name in self._packed if name.startswith(prefix))
        visible = {name.split("/", 1)[0] for name in inside}
        if self._folder is not None and (self._folder / folder).is_dir():
            visible |= {name for name in names_in(self._folder / folder) if is_visible(name)}
        return sorted(visible)

    def shallow(self, suffix: str) -> list[Path]:
        """Return the root if its name has this suffix, or such files in it or its split folders.

        Other folders are not searched: they may have millions of images.
        """
        if self._folder is None:
            return [self.root] if self.root.suffix == suffix else []
        names = ["", *(name for name in self.names() if name in _BUNDLES or split_of_name(name))]
        folders = [self._folder / name for name in names]
        listings = (_regular_files(folder, suffix) for folder in folders if folder.is_dir())
        return next((paths for paths in listings if paths), [])

    def need(self, name: str, what: str) -> Entry:
        """Return the file of this name; ``UserError`` says ``what`` is missing, and what exists."""
        entry = self.find(name)
        if entry is None:
            there = self.names(name.rpartition("/")[0]) or self.names()
            shown = ", ".join(there[:8]) + (", …" if len(there) > 8 else "")
            raise UserError(f"{self.root}: {name} ({what}) is missing; found {shown or 'nothing'}.")
        return entry

    def lines(self, name: str, what: str) -> list[str]:
        """Return the lines of a text file that are not blank; ``UserError`` if it is not there."""
        try:
            return text_lines(decode_text(self.need(name, what).location.read()))
        except UserError:
            raise
        except (OSError, ValueError) as error:  # disk errors; not text, or a damaged zip
            raise UserError(f"{self.root}: {name} ({what}) is not text: {error}.") from error

    def json(self, name: str, what: str) -> dict[str, Any]:
        """Return the object of a JSON file; ``UserError`` if there is no such object."""
        entry = self.need(name, what)
        try:
            content = parse_json(entry.location.read())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.root}: {name} ({what}) is not JSON: {error}.") from error
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise UserError(f"{self.root}: {name} ({what}) must hold an object, not a {kind}.")
        return content

    @cached_property
    def _packed(self) -> dict[str, Entry]:
        if self._folder is not None:
            zips = _regular_files(self._folder, ".zip")
            whole = (path for path in zips if not self._skip_damaged or is_zipfile(path))
            return {entry.name: entry for path in whole for entry in zip_entries(path)}
        if self.root.suffix.lower() != ".zip":
            return {}
        entries = {entry.name: entry for entry in zip_entries(self.root)}
        tops = {name.partition("/")[0] for name in entries}
        if len(tops) > 1 or tops & entries.keys():
            return entries
        inside = {name: name.partition("/")[2] for name in entries}
        return {inside[name]: replace(entry, name=inside[name]) for name, entry in entries.items()}


@contextmanager
def expecting(where: str, keys: str) -> Iterator[None]:
    """Turn errors of code that reads a JSON into a message about its form."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is not as expected, with {keys} ({type(error).__name__}: {error})."
        ) from error


def files_below(root: Path, suffix: str) -> dict[str, Path]:
    """Return a file, or visible files below a folder with this suffix, sorted by name."""
    if not root.is_dir():
        return {root.name: root}
    paths = {name: root / name for name in sorted(visible_files(root)) if name.endswith(suffix)}
    if not paths:
        raise UserError(f"{root} has no {suffix} file.")
    for path in paths.values():
        if not path.is_file():
            what = odd_file(path) or "a broken link"
            raise UserError(f"{path} is {what}; remove it.")
    return paths


def _regular_files(folder: Path, suffix: str) -> list[Path]:
    """Return the regular files directly in a folder with this suffix; no FIFOs and the like."""
    paths = (folder / name for name in names_in(folder) if name.endswith(suffix))
    return [path for path in paths if path.is_file()]


def _inmost(folder: Path) -> Path:
    """Descend into a folder while its only content is another folder."""
    try:
        with os.scandir(folder) as entries:
            first = list(islice((entry for entry in entries if is_visible(entry.name)), 2))
    except OSError as error:
        refuse_unlisted(error)
    return _inmost(Path(first[0])) if len(first) == 1 and first[0].is_dir() else folder


def _file_entry(path: Path, name: str) -> Entry:
    try:
        status = path.stat()
    except OSError:  # a broken link: reported as unreadable later
        return Entry(name, 0, "missing", Missing())
    return Entry(name, status.st_size, str(status.st_mtime_ns), InFile(str(path)))
