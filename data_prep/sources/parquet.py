"""Parquet files with a column of images ({bytes, path} or bytes) and labels, as on Hugging Face."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.files.archives import DamagedItem
from data_prep.files.tree import Tree, files_below
from data_prep.sources._labels import class_names, label_of, labels_of
from data_prep.sources.source import Item, Source
from data_prep.splits import Split, files_of
from pospre.errors import UserError, needing
from pospre.untrusted_json import parse_object

_IMAGES, _LABELS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "cls")

_PART_BYTES, _PART_ROWS = 1 << 24, 64  # of a row group, at most, in memory


@dataclass(frozen=True, slots=True)
class Row:
    """An image of a row group. A part of the last group is cached: read the rows in order."""

    file: str
    group: int
    number: int  # in the group
    column: str

    def read(self) -> bytes:
        """Return the encoded image."""
        with _telling_damage(f"row group {self.group}: ", DamagedItem):
            group = _group(self.file, self.group, self.column, os.getpid())
            if self.number < group.start:
                _group.cache_clear()
                group = _group(self.file, self.group, self.column, os.getpid())
            image = group.row(self.number).as_py()
        data = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(data, bytes):
            raise DamagedItem("the row has no image bytes")
        return data


class _Table:
    """One file: the location of its images, ``labels`` of all rows, and ``names`` of classes.

    Both are None if the file has none.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        with (
            _telling_damage(f"{path} is damaged or not a parquet file: ", UserError),
            _opened(path) as file,
        ):
            columns = file.schema_arrow.names
            self.column = next((name for name in _IMAGES if name in columns), "")
            if not self.column:
                raise UserError(
                    f"{path} has no column of images ({', '.join(_IMAGES)}); its columns are "
                    f"{', '.join(columns)}."
                )
            has_paths = _has_field(file.schema_arrow.field(self.column).type, "path")
            label = next((name for name in _LABELS if name in columns), None)
            wanted = [f"{self.column}.path"] * has_paths + [label] * (label is not None)
            rows = file.read(columns=wanted, use_threads=False).to_pylist() if wanted else []
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self.groups = [(group.num_rows, group.total_byte_size) for group in groups]
            self.names = _class_names(file.schema_arrow.metadata or {}, label)
        num_rows = sum(count for count, _ in self.groups)
        if wanted and len(rows) != num_rows:
            raise UserError(f"{path} is damaged: it declares {num_rows} rows, but has {len(rows)}.")
        self.rows = rows or [{}] * num_rows
        self.labels = None if label is None else [row[label] for row in rows]

    def items(self, classes: list[str] | None) -> list[Item]:
        """Return the rows as items."""
        labels = labels_of(classes)
        stamp = str(self.path.stat().st_mtime_ns)
        rows = [
            (group, row, size // count)
            for group, (count, size) in enumerate(self.groups)
            for row in range(count)
        ]
        items = []
        for number, (group, row, size) in enumerate(rows):
            path = (self.rows[number].get(self.column) or {}).get("path")
            name = f"{self.name}/{number:06d}" + (f"_{os.path.basename(path)}" if path else "")
            location = Row(str(self.path), group, row, self.column)
            raw = None if self.labels is None else self.labels[number]
            label = label_of(raw, labels, f"{self.path}: row {number}")
            items.append(Item(name, label, size, stamp, location))
        return items


def detects(tree: Tree) -> bool:
    """Detect by the extension of the file, or of files in the folder or its splits."""
    return bool(tree.shallow(".parquet"))


def load(tree: Tree, split: Split) -> Source:
    """List the rows of the chosen split's files."""
    root = tree.root
    paths = files_below(root, ".parquet")
    bar = tqdm(paths.items(), unit="file", desc="index", disable=None)
    tables = [_Table(path, name) for name, path in bar]
    # the classes of all splits, so that labels have the same meaning in each
    classes = _common_classes(tables, root)
    chosen, rule = files_of(split, tables, root)
    items = tuple(item for table in chosen for item in table.items(classes))
    return Source(root, items, classes, split_rule=rule).drawn(split)


def _common_classes(tables: list[_Table], root: Path) -> list[str] | None:
    named = [table for table in tables if table.names is not None]
    if named:
        for table in named:
            if table.names != named[0].names:
                raise UserError(f"{root}: {table.name} and {named[0].name} have different classes.")
        return named[0].names
    return class_names((label for table in tables for label in table.labels or ()), root)


def _has_field(kind: Any, name: str) -> bool:
    import pyarrow

    return pyarrow.types.is_struct(kind) and kind.get_field_index(name) >= 0


def _class_names(metadata: dict[bytes, bytes], label: str | None) -> list[str] | None:
    """Return the names that Hugging Face stores in the file, if any."""
    try:
        features = parse_object(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError):
        return None


class _Group:
    """A row group of images, read in parts: pyarrow cannot hold more than 2 GiB in one.

    Attributes:
        start: number of the first row that is here.
    """

    def __init__(self, path: str, group: int, column: str) -> None:
        file = _opened(path)
        about = file.metadata.row_group(group)
        rows = _PART_BYTES * about.num_rows // max(1, about.total_byte_size)
        self._parts = file.iter_batches(
            max(1, min(rows, _PART_ROWS)), [group], [column], use_threads=False
        )
        self.start, self._rows = 0, ()
        self._damage: Exception | None = None

    def row(self, number: int) -> Any:
        """Return a row that is here or follows; what is damaged is not read again."""
        if self._damage is not None:
            raise self._damage
        try:
            while number >= self.start + len(self._rows):
                self.start += len(self._rows)
                self._rows = ()
                self._rows = next(self._parts).column(0)
        except Exception as error:
            ended = isinstance(error, StopIteration)
            self._damage = LookupError(f"it ends before row {number}") if ended else error
            raise self._damage from error
        return self._rows[number - self.start]


@lru_cache(maxsize=1)
def _group(path: str, group: int, column: str, process: int) -> _Group:
    return _Group(path, group, column)


def _opened(path: str | Path) -> Any:
    """Open a file; pages are verified if they have checksums."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path, page_checksum_verification=True)


@contextmanager
def _telling_damage(before: str, kind: type[UserError | DamagedItem]) -> Iterator[None]:
    """Turn pyarrow's errors for damaged bytes into one kind, with a prefix ``before``."""
    with needing("convert", "a parquet file"):
        import pyarrow
    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, ValueError, LookupError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and kind is DamagedItem:
            raise  # a disk error
        raise kind(before + " ".join(f"{error}.".split())) from error
