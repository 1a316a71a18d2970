"""The list of shards (``index.json``) of an MDS data set: read and checked once, at the start."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pospre.data.stores.description import read_json
from pospre.errors import UserError

INDEX_NAME = "index.json"

_VERSION = 2
_IMAGE_ENCODINGS = ("bytes", "jpeg", "png")
_ENTRY_TYPES = {
    "raw_data": dict,
    "samples": int,
    "column_names": list,
    "column_encodings": list,
    "column_sizes": list,
}
_ELEMENT_TYPES = {
    "column_names": (str,),
    "column_encodings": (str,),
    "column_sizes": (int, type(None)),
}
_LABEL_BYTES = 8  # MDS stores an int as int64
_ENCODINGS = {"image": _IMAGE_ENCODINGS, "label": ("int",), "path": ("str",)}
_FEATURE_ENCODING = re.compile(r"ndarray:float32:(\d+),(\d+)")


@dataclass(frozen=True)
class FileEntry:
    """A file that belongs to a shard.

    Attributes:
        name: of the file, beside ``index.json``.
        size: in bytes.
        hashes: hexadecimal digests by algorithm, as far as the writer noted them.
    """

    name: str
    size: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class ShardEntry:
    """What the index says about a shard.

    Attributes:
        raw: the shard as it is read.
        num_samples: how many samples it holds.
        columns: name, and size in bytes where it is fixed.
        shape: of the features it holds; None for images.
        packed: the shard as it is stored, when compressed.
        compression: name of the algorithm, or None.
    """

    raw: FileEntry
    num_samples: int
    columns: tuple[tuple[str, int | None], ...]
    shape: tuple[int, int] | None
    packed: FileEntry | None
    compression: str | None

    @property
    def stored(self) -> FileEntry:
        """The file that lies in the data set."""
        return self.packed or self.raw

    def offsets(self, start: np.ndarray) -> np.ndarray | None:
        """Return the samples' offsets, int64 (samples + 1,), from a shard's first bytes.

        None where these uint8 (4 · (samples + 2),) are not those of this shard.
        """
        words = start[: len(start) // 4 * 4].view("<u4").astype(np.int64)
        offsets = words[1:]
        if (
            len(words) != self.num_samples + 2
            or words[0] != self.num_samples
            or offsets[-1] != self.raw.size
            or (np.diff(offsets) < 0).any()
        ):
            return None
        return offsets


def read_index(path: Path, remedy: str) -> list[ShardEntry]:
    """Read ``index.json`` in a directory.

    Raises:
        UserError: it is missing, damaged, or lists shards that this package does not read.
    """
    index = read_json(path / INDEX_NAME, remedy)
    if index.get("version") != _VERSION:
        raise UserError(
            f"{path / INDEX_NAME} is of MDS version {index.get('version')!r}; version "
            f"{_VERSION} is read. {remedy}"
        )
    entries = index.get("shards")
    if not isinstance(entries, list):
        raise UserError(f"{path / INDEX_NAME} lists no shards. {remedy}")
    return [_shard_entry(path, entry, remedy) for entry in entries]


def _shard_entry(path: Path, entry: Any, remedy: str) -> ShardEntry:
    if not isinstance(entry, dict):
        raise UserError(f"{path / INDEX_NAME} lists {entry!r} as a shard. {remedy}")
    if (entry.get("format"), entry.get("version")) != ("mds", _VERSION):
        raise UserError(
            f"{path} holds shards of format {entry.get('format')!r}, version "
            f"{entry.get('version')!r}; MDS version {_VERSION} is read. {remedy}"
        )
    _check_fields(path, entry, remedy)
    shape = _check_columns(path, entry, remedy)
    compression = entry.get("compression")
    return ShardEntry(
        raw=_file_entry(entry["raw_data"]),
        num_samples=entry["samples"],
        columns=tuple(zip(entry["column_names"], entry["column_sizes"], strict=True)),
        shape=shape,
        packed=_file_entry(entry["zip_data"]) if compression else None,
        compression=compression or None,
    )


def _file_entry(noted: dict[str, Any]) -> FileEntry:
    hashes = noted.get("hashes")
    return FileEntry(
        noted["basename"], noted["bytes"], dict(hashes) if isinstance(hashes, dict) else {}
    )


def _check_fields(path: Path, entry: dict[str, Any], remedy: str) -> None:
    """Refuse a description that lacks something."""
    wrong = [key for key, kind in _ENTRY_TYPES.items() if not isinstance(entry.get(key), kind)]
    wrong += [
        key
        for key, kinds in _ELEMENT_TYPES.items()
        if not wrong and not all(isinstance(element, kinds) for element in entry[key])
    ]
    if not isinstance(entry.get("compression"), str | None):
        wrong.append("compression")
    if not wrong:
        wrong += ["samples"] * (entry["samples"] < 0)
        wrong += ["column_sizes"] * any((size or 0) < 0 for size in entry["column_sizes"])
        lengths = {len(entry[key]) for key in _ENTRY_TYPES if key.startswith("column_")}
        wrong += ["column_names"] * (len(lengths) != 1)
        files = ["raw_data"] + ["zip_data"] * bool(entry.get("compression"))
        wrong += [key for key in files if not _names_a_file(entry.get(key))]
    if wrong:
        raise UserError(
            f"{path / INDEX_NAME} describes a shard without a valid {wrong[0]!r}. {remedy}"
        )


def _names_a_file(noted: Any) -> bool:
    """Tell whether a file is named beside the index (never above it), with its size."""
    if not isinstance(noted, dict) or not isinstance(noted.get("bytes"), int):
        return False
    hashes = noted.get("hashes")
    if isinstance(hashes, dict) and not all(isinstance(digest, str) for digest in hashes.values()):
        return False
    name = noted.get("basename")
    if not isinstance(name, str) or name in ("", "..") or "\0" in name:
        return False
    return name == Path(name).name


def _check_columns(path: Path, entry: dict[str, Any], remedy: str) -> tuple[int, int] | None:
    """Return the shape of the features in a shard; None where it holds images."""
    found = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    match = _FEATURE_ENCODING.fullmatch(found.get("features", ""))
    wrong = [name for name, kinds in _ENCODINGS.items() if found.get(name, kinds[0]) not in kinds]
    if wrong or ("image" in found) == (match is not None):
        raise UserError(
            f"{path} has the columns {found}; needed: image (bytes, jpeg or png) or "
            "features (ndarray:float32:H,W), label (int) and path (str), of which the last two "
            f"may be missing. {remedy}"
        )
    shape = None if match is None else (int(match[1]), int(match[2]))
    _check_sizes(path, dict(zip(found, entry["column_sizes"], strict=True)), shape, remedy)
    return shape


def _check_sizes(
    path: Path, sizes: dict[str, int | None], shape: tuple[int, int] | None, remedy: str
) -> None:
    """Refuse numbers of other sizes than their types have."""
    needed = {"label": _LABEL_BYTES}
    if shape is not None:
        needed["features"] = 4 * shape[0] * shape[1]
    for name, size in needed.items():
        if sizes.get(name, size) != size:
            raise UserError(
                f"{path / INDEX_NAME} gives the column '{name}' {sizes[name]} bytes; its type has "
                f"{size}. {remedy}"
            )
