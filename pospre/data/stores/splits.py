"""The splits of a folder: train, val and test, by the names of its sub-folders."""

import os
import re
from pathlib import Path

from pospre.data.stores.files import is_visible, refuse_unlisted
from pospre.errors import UserError

_SPLIT = re.compile(
    r"(?:^|[/_.-])(train|training|val|valid|validation|test)(?=[/_.-]|\d|$)", re.IGNORECASE
)
_SAME = {"training": "train", "valid": "val", "validation": "val"}


def split_of_name(name: str) -> str | None:
    """Return the split named by a file or folder: train, val or test."""
    match = _SPLIT.search(name)
    return _split(match[1]) if match else None


def own_splits(root: Path) -> dict[str, Path]:
    """Return the folder of each split in a folder; empty if it has no splits of its own.

    It has splits if every sub-folder has the name of one, and train is among them: a class may also
    be called train. If it has only one sub-folder, this may have them instead.

    Raises:
        UserError: only some sub-folders are splits or have splits, or two are the same split.
    """
    parts = _splits_in(root)
    if parts:
        return parts
    folders = _sub_folders(root)
    inside = {name: _splits_in(root / name) for name in folders}
    if len(folders) == 1:
        return inside[folders[0]]
    split = next((name for name, splits in inside.items() if len(splits) > 1), None)
    if split is not None:
        raise UserError(
            f"{root}/{split} has splits of its own ({', '.join(inside[split])}), but is not the "
            f"only folder in {root}; give {root}/{split}, or the folder of one split."
        )
    return {}


def _splits_in(root: Path) -> dict[str, Path]:
    folders = _sub_folders(root)
    splits = {split_of_name(name) or "": root / name for name in folders}
    exact = {_split(name) for name in folders}
    if "" in splits and "train" in exact and exact & {"val", "test"}:
        raise UserError(
            f"{root} has splits ({', '.join(sorted(set(splits) - {''}))}), but {splits[''].name} "
            "is not one; move it away, or give the folder of one split."
        )
    if "train" not in splits or "" in splits:
        return {}
    for name in folders:
        other = splits[split_of_name(name) or ""].name
        if other != name:
            raise UserError(
                f"{root}: {name} and {other} are both the split {split_of_name(name)}; move one "
                "away."
            )
    return splits


def _split(name: str) -> str:
    return _SAME.get(name.lower(), name.lower())


def _sub_folders(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return sorted(
                entry.name for entry in entries if is_visible(entry.name) and _is_dir(entry)
            )
    except OSError as error:
        refuse_unlisted(error)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a broken or circular link is none."""
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()
