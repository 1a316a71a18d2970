"""MDS shards (the format of MosaicML Streaming) in a local directory.

The shards are read as they lie on disk: uint32 N, N + 1 uint32 offsets, a header, then N samples,
each with the uint32 sizes of its variable columns followed by the columns. Streaming itself is not
imported, which would cost seconds and shared memory that nothing here needs.
"""

from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pospre.data.stores.description import (
    SIDECAR_NAME,
    read_sidecar,
    unpack_identity,
    unpack_moments,
    unpack_noted,
    unpack_sums,
)
from pospre.data.stores.files import Place, SampleBytes, odd_file, read_bytes
from pospre.data.stores.identity import Identity, hash_of
from pospre.data.stores.mds_index import INDEX_NAME, ShardEntry, read_index
from pospre.data.stores.reader import DamagedSample, Features, Reader, Sample
from pospre.errors import UserError
from pospre.untrusted_json import parse_json

_SHARD_SUFFIX = ".mds"
_FEATURES = "features"


@dataclass(frozen=True)
class Shard:
    """A shard on the local disk.

    Attributes:
        path: the file.
        offsets: of the samples, int64 (samples + 1,).
        file: the file, where it stays open.
    """

    path: Path
    offsets: np.ndarray
    file: FileIO | None = None

    def place(self, number: int) -> Place:
        """Return where a sample lies."""
        begin, end = self.offsets[number : number + 2].tolist()
        return Place(self.path, begin, end - begin)

    def read(self, number: int) -> Tensor:
        """Return a sample's bytes, uint8 (N,)."""
        path, offset, size = self.place(number)
        return read_bytes(self.file or path, offset, size)


def is_mds(path: Path) -> bool:
    """Tell whether a directory holds MDS shards, finished or not.

    An ``index.json`` that lists no shards may lie in a folder of images and means nothing.
    """
    if (path / SIDECAR_NAME).exists() or next(path.glob(f"*{_SHARD_SUFFIX}"), None) is not None:
        return True
    if odd_file(path / INDEX_NAME) is not None:
        return False
    try:
        index = parse_json((path / INDEX_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and "shards" in index


def load_shard(path: Path, entry: ShardEntry, remedy: str) -> Shard:
    """Check a shard's size and read its offsets.

    Raises:
        UserError: it is missing or is not what the index says.
    """
    found = path.stat().st_size if path.is_file() else None
    if found != entry.raw.size:
        state = "is missing" if found is None else f"has {found} bytes instead of {entry.raw.size}"
        raise UserError(f"shard {path} {state}. {remedy}")
    start = read_bytes(path, 0, min(found, 4 * (entry.num_samples + 2)))
    offsets = entry.offsets(start.numpy())
    if offsets is None:
        raise UserError(f"shard {path} does not start as index.json says. {remedy}")
    return Shard(path, offsets)


class MdsReader(Reader):
    """Reads the columns ``image`` (encoded bytes), ``label`` (int) and ``path`` (str).

    Data sets of features have ``features`` (float32 of one shape) instead of ``image``.
    ``label`` and ``path`` may be missing in shards of other origin; further columns are ignored.
    """

    _bytes: SampleBytes

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remedy = (
            f"Copy the data set again, or convert again with "
            f"`python -m data_prep.convert SRC {path} --format mds`."
        )
        self._describe(path)
        packed = [entry for entry in self._entries if entry.packed]
        if packed:
            raise UserError(
                f"{path} holds shards compressed with {packed[0].compression}, which are not read "
                "from disk; write them without compression (JPEGs hardly shrink)."
            )
        self._shards = [load_shard(path / e.raw.name, e, self.remedy) for e in self._entries]
        self._bytes = SampleBytes(self._place)
        self.num_bytes = sum(entry.raw.size for entry in self._entries)

    def _describe(self, folder: Path) -> None:
        """Read and compare what ``index.json`` and ``pospre.json`` in a folder say."""
        self.format = "mds"
        self._entries = read_index(folder, self.remedy)
        self._ends = np.cumsum([entry.num_samples for entry in self._entries], dtype=np.int64)
        if not len(self._ends) or self._ends[-1] == 0:
            raise UserError(f"{self.path} holds no samples. {self.remedy}")
        sidecar = read_sidecar(folder / SIDECAR_NAME, "pospre-mds", len(self), self.remedy)
        self._manifest = sidecar.get("manifest") or {}
        self._check_manifest()
        self.classes = sidecar.get("classes")
        largest = sidecar.get("max_pixels")
        self.max_pixels = largest if isinstance(largest, int) and largest > 0 else None
        name = f"{folder / SIDECAR_NAME}"
        self.checksums = unpack_sums(sidecar, len(self), name, self.remedy)
        (shape, *others) = {entry.shape for entry in self._entries}
        if others:
            raise UserError(
                f"{self.path} holds features of several shapes, or images too. {self.remedy}"
            )
        if shape is not None:
            noted = sidecar.get("features", {})
            moments = unpack_moments(noted, shape[1], f"{name}: features", self.remedy)
            self.features = Features(shape, *moments)
        self.noted = unpack_noted(sidecar, name, self.remedy)
        self._known = unpack_identity(sidecar, name, self.remedy)
        if self.checksums is None:
            shards = [f"{entry.num_samples} {entry.raw!r}".encode() for entry in self._entries]
            self._known["shards (sizes and hashes)"] = hash_of(shards)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def parts(self) -> np.ndarray:
        """Ends of the shards, int64 (shards,)."""
        return self._ends

    def read(self, index: int) -> Sample:
        """Return a sample's encoded image, or its features, and its label."""
        columns = self._columns(index)
        value = _label(columns)
        if self.features is None:
            return Sample(columns["image"], value)
        numbers = columns[_FEATURES].view(torch.float32)
        return Sample(numbers.view(*self.features.shape, 1), value)

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label and, where known, the path that it was converted from."""
        columns = self._columns(index)
        return _label(columns), _source(columns)

    def name(self, index: int) -> str:
        """Return shard, place in the shard and, where known, the file it was converted from."""
        place, number = self._locate(index)
        try:
            source = _source(self._columns(index))
        except UserError:  # what is named is often what cannot be read
            source = ""
        return f"{self._shard_name(place)}, sample {number}" + (f" ({source})" if source else "")

    def _own_identity(self) -> Identity:
        return self._known

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the place of a sample's shard among the shards, and its number in there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = int(np.searchsorted(self._ends, index, side="right"))
        return place, int(index - self._ends[place]) + self._entries[place].num_samples

    def _place(self, index: int) -> Place:
        place, number = self._locate(index)
        return self._shards[place].place(number)

    def _shard_name(self, place: int) -> str:
        """Return what to call a shard in messages."""
        return str(self.path / self._entries[place].raw.name)

    def _data(self, index: int) -> Tensor:
        return self._bytes.read(index)

    def _columns(self, index: int) -> dict[str, Tensor]:
        """Read a sample and cut it into its columns."""
        data = self._data(index)
        place, number = self._locate(index)
        layout = self._entries[place].columns
        num_variable = sum(size is None for size in layout.values())
        head = data[: 4 * num_variable].numpy()
        sizes = head[: len(head) // 4 * 4].view("<u4").tolist()
        columns, position = {}, 4 * num_variable
        for name, fixed in layout.items():
            size = fixed if fixed is not None else sizes.pop(0) if sizes else 0
            columns[name] = data[position : position + size]
            position += size
        if position != len(data):
            raise DamagedSample(
                f"{self._shard_name(place)}, sample {number} is damaged. {self.remedy}"
            )
        return columns

    def _check_manifest(self) -> None:
        """Refuse a description that counts other bytes than the index."""
        noted: Any = self._manifest
        if not isinstance(noted, dict) or not all(map(_is_file_note, noted.values())):
            raise UserError(
                f"{self.path / SIDECAR_NAME}: manifest does not give size and SHA-256 of each "
                f"shard. {self.remedy}"
            )
        listed = {name: entry[0] for name, entry in noted.items()}
        found = {entry.raw.name: entry.raw.size for entry in self._entries}
        if listed and listed != found:
            names = sorted(name for name, _ in listed.items() ^ found.items())
            raise UserError(
                f"{self.path / SIDECAR_NAME} and {INDEX_NAME} disagree about {names[0]}. "
                f"{self.remedy}"
            )


def _label(columns: dict[str, Tensor]) -> int:
    label = columns.get("label")
    return -1 if label is None else int(label.numpy().view("<i8")[0])


def _source(columns: dict[str, Tensor]) -> str:
    return bytes(columns["path"].numpy()).decode(errors="replace") if "path" in columns else ""


def _is_file_note(noted: Any) -> bool:
    return isinstance(noted, list) and [type(part) for part in noted] == [int, str]
