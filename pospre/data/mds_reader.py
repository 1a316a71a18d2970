"""MDS shards (the format of MosaicML Streaming) in a local directory.

The shards are read as they lie on disk: uint32 N, N + 1 uint32 offsets, a header, then N samples,
each with the uint32 sizes of its variable columns followed by the columns. Streaming itself is not
imported, which would cost seconds and shared memory that nothing here needs.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pospre.data.samples import Features, Reader, Sample, read_bytes
from pospre.data.sidecar import read_json, read_sidecar
from pospre.errors import UserError

INDEX_NAME = "index.json"
SIDECAR_NAME = "pospre.json"

_VERSION = 2
_IMAGE_ENCODINGS = ("bytes", "jpeg", "png")
_SHARD_SUFFIX = ".mds"
_ENTRY_TYPES = {
    "raw_data": dict,
    "samples": int,
    "column_names": list,
    "column_encodings": list,
    "column_sizes": list,
}
_ENCODINGS = {"image": _IMAGE_ENCODINGS, "label": ("int",), "path": ("str",)}
_FEATURES = "features"
_FEATURE_ENCODING = re.compile(r"ndarray:float32:(\d+),(\d+)")


@dataclass(frozen=True)
class _Shard:
    path: Path
    columns: tuple[tuple[str, int | None], ...]  # name, and size in bytes where it is fixed
    offsets: np.ndarray  # int64 (samples + 1,)


def is_mds(path: Path) -> bool:
    """Tell whether a directory holds MDS shards, finished or not.

    An ``index.json`` that lists no shards may lie in a folder of images and means nothing.
    """
    if (path / SIDECAR_NAME).exists() or next(path.glob(f"*{_SHARD_SUFFIX}"), None) is not None:
        return True
    try:
        index = json.loads((path / INDEX_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and "shards" in index


class MdsReader(Reader):
    """Reads the columns ``image`` (encoded bytes), ``label`` (int) and ``path`` (str).

    Data sets of features have ``features`` (float32 of one shape) instead of ``image``.
    ``label`` and ``path`` may be missing in shards of other origin; further columns are ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = "mds"
        self.remedy = (
            f"Copy the data set again, or convert again with "
            f"`python -m data_prep.convert SRC {path} --format mds`."
        )
        entries = self._shard_entries()
        self._shards = [self._open_shard(entry) for entry in entries]
        shapes = {_feature_shape(entry) for entry in entries}
        counts = [len(shard.offsets) - 1 for shard in self._shards]
        self._ends = np.cumsum(counts)
        if not counts or self._ends[-1] == 0:
            raise UserError(f"{path} holds no samples. {self.remedy}")
        sidecar = read_sidecar(path / SIDECAR_NAME, "pospre-mds", len(self), self.remedy)
        self._check_manifest(sidecar.get("manifest"))
        self.classes = sidecar.get("classes")
        (shape, *others) = shapes
        if others:
            raise UserError(
                f"{path} holds features of several shapes, or images too. {self.remedy}"
            )
        if shape is not None:
            self.features = self._describe_features(shape, sidecar.get("features", {}))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Sample:
        """Return a sample's encoded image, or its features, and its label."""
        shard, number = self._locate(index)
        columns = self._read_columns(shard, number)
        label = columns.get("label")
        value = -1 if label is None else int(label.numpy().view("<i8")[0])
        if self.features is None:
            return Sample(columns["image"], value)
        numbers = columns[_FEATURES].view(torch.float32)
        return Sample(numbers.view(*self.features.shape, 1), value)

    def name(self, index: int) -> str:
        """Return shard, place in the shard and, where known, the file it was converted from."""
        shard, number = self._locate(index)
        source = self._read_columns(shard, number).get("path")
        came_from = "" if source is None else f" ({bytes(source.numpy()).decode()})"
        return f"{shard.path}, sample {number}{came_from}"

    def _locate(self, index: int) -> tuple[_Shard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = int(np.searchsorted(self._ends, index, side="right"))
        shard = self._shards[place]
        return shard, int(index - self._ends[place] + len(shard.offsets) - 1)

    def _read_columns(self, shard: _Shard, number: int) -> dict[str, Any]:
        begin, end = shard.offsets[number : number + 2].tolist()
        data = read_bytes(shard.path, begin, end - begin)
        num_variable = sum(size is None for _, size in shard.columns)
        head = data[: 4 * num_variable].numpy().view("<u4").tolist()
        columns, position = {}, 4 * num_variable
        for name, fixed in shard.columns:
            size = head.pop(0) if fixed is None else fixed
            columns[name] = data[position : position + size]
            position += size
        if position != len(data):
            raise UserError(f"{shard.path}, sample {number} is damaged. {self.remedy}")
        return columns

    def _shard_entries(self) -> list[dict[str, Any]]:
        index = read_json(self.path / INDEX_NAME, self.remedy)
        if index.get("version") != _VERSION:
            raise UserError(
                f"{self.path / INDEX_NAME} is of MDS version {index.get('version')!r}; version "
                f"{_VERSION} is read. {self.remedy}"
            )
        entries = index.get("shards")
        if not isinstance(entries, list):
            raise UserError(f"{self.path / INDEX_NAME} lists no shards. {self.remedy}")
        return entries

    def _open_shard(self, entry: dict[str, Any]) -> _Shard:
        """Check a shard's description and size, and read its offsets."""
        if not isinstance(entry, dict):
            raise UserError(f"{self.path / INDEX_NAME} lists {entry!r} as a shard. {self.remedy}")
        if (entry.get("format"), entry.get("version")) != ("mds", _VERSION):
            raise UserError(
                f"{self.path} holds shards of format {entry.get('format')!r}, version "
                f"{entry.get('version')!r}; MDS version {_VERSION} is read. {self.remedy}"
            )
        if entry.get("compression"):
            raise UserError(
                f"{self.path} holds shards compressed with {entry['compression']}, which are not "
                "read; write them without compression (JPEGs hardly shrink)."
            )
        self._check_entry(entry)
        self._check_columns(entry)
        path = self.path / entry["raw_data"]["basename"]
        expected = entry["raw_data"]["bytes"]
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            state = "is missing" if found is None else f"has {found} bytes instead of {expected}"
            raise UserError(f"shard {path} {state}. {self.remedy}")
        columns = tuple(zip(entry["column_names"], entry["column_sizes"], strict=True))
        return _Shard(path, columns, self._read_offsets(path, entry["samples"], expected))

    def _read_offsets(self, path: Path, num_samples: int, num_bytes: int) -> np.ndarray:
        words = read_bytes(path, 0, min(num_bytes, 4 * (num_samples + 2))).numpy()
        words = words[: len(words) // 4 * 4].view("<u4").astype(np.int64)
        offsets = words[1:]
        if (
            len(words) != num_samples + 2
            or words[0] != num_samples
            or offsets[-1] != num_bytes
            or (np.diff(offsets) < 0).any()
        ):
            raise UserError(f"shard {path} does not start as index.json says. {self.remedy}")
        return offsets

    def _check_entry(self, entry: dict[str, Any]) -> None:
        """Refuse a description that lacks something."""
        wrong = [key for key, kind in _ENTRY_TYPES.items() if not isinstance(entry.get(key), kind)]
        if not wrong:
            lengths = {len(entry[key]) for key in _ENTRY_TYPES if key.startswith("column_")}
            wrong += ["column_names"] * (len(lengths) != 1)
            data = entry["raw_data"]
            has_file = isinstance(data.get("basename"), str) and isinstance(data.get("bytes"), int)
            wrong += ["raw_data"] * (not has_file)
        if wrong:
            raise UserError(
                f"{self.path / INDEX_NAME} describes a shard without a valid {wrong[0]!r}. "
                f"{self.remedy}"
            )

    def _check_columns(self, entry: dict[str, Any]) -> None:
        found = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
        wrong = [
            name for name, kinds in _ENCODINGS.items() if found.get(name, kinds[0]) not in kinds
        ]
        if wrong or ("image" in found) == (_feature_shape(entry) is not None):
            raise UserError(
                f"{self.path} has the columns {found}; needed: image (bytes, jpeg or png) or "
                "features (ndarray:float32:H,W), label (int) and path (str), of which the last two "
                f"may be missing. {self.remedy}"
            )

    def _describe_features(self, shape: tuple[int, int], noted: Any) -> Features:
        """Return the shape of the features and what the description notes about them."""
        parts: list[tuple[float, ...]] = []
        for key in ("mean", "std"):
            part: Any = noted.get(key, []) if isinstance(noted, dict) else None
            is_list = isinstance(part, list) and len(part) in (0, shape[1])
            if not is_list or not all(isinstance(value, float) for value in part):
                raise UserError(
                    f"{self.path / SIDECAR_NAME}: features.{key} is no list of {shape[1]} numbers. "
                    f"{self.remedy}"
                )
            parts.append(tuple(part))
        return Features(shape, *parts)

    def _check_manifest(self, manifest: dict[str, Any] | None) -> None:
        if manifest is None:
            return
        listed = {name: entry[0] for name, entry in manifest.items()}
        found = {shard.path.name: int(shard.offsets[-1]) for shard in self._shards}
        if listed != found:
            names = sorted(name for name, _ in listed.items() ^ found.items())
            raise UserError(
                f"{self.path / SIDECAR_NAME} and {INDEX_NAME} disagree about {names[0]}. "
                f"{self.remedy}"
            )


def _feature_shape(entry: dict[str, Any]) -> tuple[int, int] | None:
    """Return the shape of the features in a shard; None where it holds images."""
    columns = zip(entry["column_names"], entry["column_encodings"], strict=True)
    match = _FEATURE_ENCODING.fullmatch(dict(columns).get(_FEATURES, ""))
    return None if match is None else (int(match[1]), int(match[2]))
