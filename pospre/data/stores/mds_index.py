"""The list of shards (``index.json``) of an MDS data set, read and checked once at the start.

Streaming's own classes check nothing, and take three seconds and 180 MB to import.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, StrictInt, StrictStr, ValidationError

from pospre.data.stores.description import read_file
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

INDEX_NAME = "index.json"

_VERSION = 2
_LABEL_BYTES = 8  # MDS stores an int as int64
_ENCODINGS = {"image": ("bytes", "jpeg", "png"), "label": ("int",), "path": ("str",)}
_Count = Annotated[StrictInt, Field(ge=0, le=1 << 40)]
_Size = Annotated[StrictInt, Field(ge=0, le=1 << 33)]  # offsets in a shard are uint32
_FEATURE_ENCODING = re.compile(r"ndarray:float32:(\d+),(\d+)")


def _below_the_index(name: str) -> str:
    """Refuse names that lead out of the folder; Streaming's ``merge_index`` writes subfolders."""
    if "\0" in name or {"", ".", ".."} & {*name.split("/")}:
        raise ValueError("not a file in this folder")
    return name


class FileEntry(BaseModel, frozen=True):
    """A file that belongs to a shard, as the index describes it.

    Attributes:
        hashes: hexadecimal digests by algorithm, as recorded by the writer.
    """

    name: Annotated[StrictStr, AfterValidator(_below_the_index)] = Field(alias="basename")
    size: _Size = Field(alias="bytes")
    hashes: dict[str, StrictStr] = {}

    @property
    def flat_name(self) -> str:
        """Its name in a cache, which has no subfolders."""
        return self.name.replace("%", "%25").replace("/", "%2F")


class ShardEntry(BaseModel, frozen=True):
    """A shard's entry in the index.

    Attributes:
        raw: the shard as read.
        packed: the shard as stored, if compressed.
    """

    raw: FileEntry = Field(alias="raw_data")
    num_samples: _Count = Field(alias="samples")
    column_names: list[StrictStr]
    column_encodings: list[StrictStr]
    column_sizes: list[_Count | None]
    compression: StrictStr | None = None
    packed: FileEntry | None = Field(default=None, alias="zip_data")

    @cached_property
    def columns(self) -> dict[str, int | None]:
        """Size in bytes of each column with a fixed size."""
        return dict(zip(self.column_names, self.column_sizes, strict=True))

    @cached_property
    def encodings(self) -> dict[str, str]:
        """Encoding of each column."""
        return dict(zip(self.column_names, self.column_encodings, strict=True))

    @property
    def shape(self) -> tuple[int, int] | None:
        """Shape of its features; None for images."""
        match = _FEATURE_ENCODING.fullmatch(self.encodings.get("features", ""))
        return None if match is None else (int(match[1]), int(match[2]))

    @property
    def is_hashed(self) -> bool:
        """Whether the index says what the shard contains."""
        return bool(self.raw.hashes or self.stored.hashes)

    @property
    def stored(self) -> FileEntry:
        """The file as stored in the data set."""
        return self.packed or self.raw

    def offsets(self, start: np.ndarray) -> np.ndarray | None:
        """Return the samples' offsets, int64 (samples + 1,), from a shard's first bytes.

        None if these uint8 (4 · (samples + 2),) do not belong to this shard.
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

    def cut(self, sample: np.ndarray) -> dict[str, np.ndarray] | None:
        """Split a sample's bytes, uint8 (n,), into columns; None if they are damaged."""
        num_variable = sum(size is None for size in self.columns.values())
        head = sample[: 4 * num_variable]
        sizes = head[: len(head) // 4 * 4].view("<u4").tolist()
        columns, position = {}, 4 * num_variable
        for name, fixed in self.columns.items():
            size = fixed if fixed is not None else sizes.pop(0) if sizes else 0
            columns[name] = sample[position : position + size]
            position += size
        return columns if position == len(sample) else None


def read_index(path: Path, remedy: str) -> list[ShardEntry]:
    """Read ``index.json`` in a directory; see ``parse_index``."""
    return parse_index(read_file(path / INDEX_NAME, remedy), str(path), remedy)


def parse_index(text: bytes, path: str, remedy: str) -> list[ShardEntry]:
    """Parse the index of the folder ``path``; ``UserError`` if it is damaged or not supported."""
    where = f"{path}/{INDEX_NAME}"
    try:
        index = parse_object(text)
    except ValueError as error:
        raise UserError(f"{where} cannot be read ({error}). {remedy}") from error
    if index.get("version") != _VERSION:
        raise UserError(
            f"{where} has MDS version {index.get('version')!r}; version {_VERSION} is supported. "
            f"{remedy}"
        )
    entries = index.get("shards")
    if not isinstance(entries, list):
        raise UserError(f"{where} lists no shards. {remedy}")
    return [_shard_entry(path, entry, remedy) for entry in entries]


def _shard_entry(path: str, entry: Any, remedy: str) -> ShardEntry:
    if not isinstance(entry, dict):
        raise UserError(f"{path}/{INDEX_NAME} lists {entry!r} as a shard. {remedy}")
    if (entry.get("format"), entry.get("version")) != ("mds", _VERSION):
        raise UserError(
            f"{path} has shards of format {entry.get('format')!r}, version "
            f"{entry.get('version')!r}; MDS version {_VERSION} is supported. {remedy}"
        )
    shard = _checked(path, entry, remedy)
    _check_columns(path, shard, remedy)
    return shard


def _checked(path: str, entry: dict[str, Any], remedy: str) -> ShardEntry:
    """Refuse an incomplete entry."""
    is_packed = bool(entry.get("compression"))
    try:
        shard = ShardEntry.model_validate(entry if is_packed else {**entry, "zip_data": None})
    except ValidationError as error:
        wrong = error.errors()[0]["loc"][0]
    else:
        columns = shard.column_names, shard.column_encodings, shard.column_sizes
        if len({len(column) for column in columns}) == 1 and is_packed == bool(shard.packed):
            return shard
        wrong = "zip_data" if is_packed and not shard.packed else "column_names"
    raise UserError(f"{path}/{INDEX_NAME} describes a shard without a valid {wrong!r}. {remedy}")


def _check_columns(path: str, shard: ShardEntry, remedy: str) -> None:
    """Refuse unsupported columns."""
    encodings, shape = shard.encodings, shard.shape
    wrong = [
        name for name, kinds in _ENCODINGS.items() if encodings.get(name, kinds[0]) not in kinds
    ]
    if wrong or ("image" in encodings) == (shape is not None):
        raise UserError(
            f"{path} has the columns {encodings}; needed: image (bytes, jpeg or png) or "
            "features (ndarray:float32:H,W), label (int) and path (str), of which the last two "
            f"may be missing. {remedy}"
        )
    needed = {"label": _LABEL_BYTES}
    if shape is not None:
        needed["features"] = 4 * shape[0] * shape[1]
    for name, size in needed.items():
        if shard.columns.get(name, size) != size:
            raise UserError(
                f"{path}/{INDEX_NAME} gives the column '{name}' {shard.columns[name]} bytes; its "
                f"type has {size}. {remedy}"
            )
