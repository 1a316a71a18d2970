"""Pooled features as one parquet table, with the lines of their images."""

from collections.abc import Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pospre.atomic_file import atomic_open, flush
from pospre.embedding.layouts import Array
from pospre.errors import needing
from pospre.untrusted_json import parse_object

PARQUET = "features.parquet"
_ROWS = 1 << 16  # of a row group
_COLUMNS = ("row", "index", "path", "label", "sha256")


def pyarrow(module: str = "pyarrow") -> Any:
    """Return a module of pyarrow; ``UserError`` if it is not installed."""
    with needing("convert", "format=parquet"):
        return import_module(module)


def write_parquet(folder: Path, arrays: Sequence[Array], lines: Path) -> None:
    """Write the ``.npy`` files of ``arrays`` in a folder, and their images' lines, as a table."""
    pa, pq = pyarrow(), pyarrow("pyarrow.parquet")
    kinds = [pa.int64(), pa.int64(), pa.string(), pa.int64(), pa.string()]
    vectors = {
        array.name: pa.list_(pa.from_numpy_dtype(np.dtype(array.dtype)), array.shape[1])
        for array in arrays
    }
    schema = pa.schema([*zip(_COLUMNS, kinds, strict=True), *vectors.items()])
    values = {array.name: np.load(folder / f"{array.name}.npy", mmap_mode="r") for array in arrays}
    with (
        atomic_open(folder / PARQUET) as target,
        lines.open("rb") as file,
        pq.ParquetWriter(target, schema) as writer,
    ):
        for first in range(0, arrays[0].shape[0], _ROWS):
            rows = [parse_object(line) for line in islice(file, _ROWS)]
            for row in rows:  # a name that is not valid Unicode
                name = (row["path"] or "").encode("utf-8", "surrogateescape")
                row["path"] = name.decode("utf-8", "replace") or None
            columns = [
                pa.array([row.get(key) for row in rows], kind)
                for key, kind in zip(_COLUMNS, kinds, strict=True)
            ]
            for name, kind in vectors.items():
                numbers = pa.array(values[name][first : first + len(rows)].reshape(-1))
                columns.append(pa.FixedSizeListArray.from_arrays(numbers, type=kind))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        writer.close()
        flush(target)
