"""MDS shards (MosaicML Streaming's format) in a local directory.

Shards are read directly: uint32 N, N + 1 uint32 offsets, a header, then N samples, each with the
uint32 sizes of its variable columns followed by the columns. Streaming is not imported: it would
cost seconds, and shared memory that is not needed here.
"""

from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pospre.data.stores.description import (
    SIDECAR_NAME,
    Description,
    Identity,
    Moments,
    hash_of,
    read_sidecar,
    unpack_sums,
)
from pospre.data.stores.files import ByteRange, SampleBytes, odd_file, read_bytes
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
        offsets: offsets of the samples, int64 (samples + 1,).
        file: the file, if it stays open.
    """

    path: Path
    offsets: np.ndarray
    file: FileIO | None = None

    def byte_range(self, number: int) -> ByteRange:
        """Return the location of a sample."""
        begin, end = self.offsets[number : number + 2].tolist()
        return ByteRange(self.path, begin, end - begin)

    def read(self, number: int) -> Tensor:
        """Return a sample's bytes, uint8 (N,)."""
        path, offset, size = self.byte_range(number)
        return read_bytes(self.file or path, offset, size)


def is_mds(path: Path) -> bool:
    """Return whether a directory has MDS shards, complete or not.

    An ``index.json`` without shards may be in a folder of images, and is ignored.
    """
    if (path / SIDECAR_NAME).exists() or next(path.glob(f"*{_SHARD_SUFFIX}"), None) is not None:
        return True
    if odd_file(path / INDEX_NAME) is not None:
        return False
    try:
        index = parse_json((path / INDEX_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and "shards" in index


def load_shard(path: Path, entry: ShardEntry, remedy: str) -> Shard:
    """Check a shard's size and read its offsets; ``UserError`` if it does not match the index."""
    size = path.stat().st_size if path.is_file() else None
    if size != entry.raw.size:
        state = "is missing" if size is None else f"has {size} bytes instead of {entry.raw.size}"
        raise UserError(f"shard {path} {state}. {remedy}")
    start = read_bytes(path, 0, min(size, 4 * (entry.num_samples + 2)))
    offsets = entry.offsets(start.numpy())
    if offsets is None:
        raise UserError(f"shard {path} does not match index.json at its start. {remedy}")
    return Shard(path, offsets)


class MdsReader(Reader):
    """Reads the columns ``image`` (encoded bytes), ``label`` (int) and ``path`` (str).

    Data sets of features have ``features`` (float32 of one shape) instead of ``image``.
    ``label`` and ``path`` may be missing in shards from elsewhere; further columns are ignored.
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
                f"{path} has shards compressed with {packed[0].compression}, which are not read "
                "from disk; write them without compression (JPEGs hardly shrink)."
            )
        self._shards = [load_shard(path / e.raw.name, e, self.remedy) for e in self._entries]
        self._bytes = SampleBytes(self._byte_range)
        self.num_bytes = sum(entry.raw.size for entry in self._entries)

    def _describe(self, folder: Path) -> None:
        """Read and compare ``index.json`` and ``pospre.json`` in a folder."""
        self.format = "mds"
        self._entries = read_index(folder, self.remedy)
        self._ends = np.cumsum([entry.num_samples for entry in self._entries], dtype=np.int64)
        if not len(self._ends) or self._ends[-1] == 0:
            raise UserError(f"{self.path} has no samples. {self.remedy}")
        path = folder / SIDECAR_NAME
        description = read_sidecar(path, "mds", len(self), self.remedy)
        self.classes, moments, known = None, Moments(), {}
        if description is not None:
            self.classes, self.noted = description.classes, description.noted
            self.max_pixels = description.max_pixels
            self.checksums = unpack_sums(description, f"{path}", self.remedy)
            moments, known = description.features, description.identity
            self._check_manifest(description)
        (shape, *others) = {entry.shape for entry in self._entries}
        if others:
            raise UserError(
                f"{self.path} has features of several shapes, or also images. {self.remedy}"
            )
        if shape is not None:
            if not moments.fits(shape[1]):
                raise UserError(f"{path}: features holds no list of {shape[1]} numbers. "
                                f"{self.remedy}")  # fmt: skip
            self.features = Features(shape, moments.mean, moments.std)
        if self.checksums is None:
            shards = [f"{entry.num_samples} {entry.raw!r}".encode() for entry in self._entries]
            known["shards (sizes and hashes)"] = hash_of(shards)
        self._known = known

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
            return Sample(torch.from_numpy(columns["image"]), value)
        numbers = torch.from_numpy(columns[_FEATURES]).view(torch.float32)
        return Sample(numbers.view(*self.features.shape, 1), value)

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label and its source's path, if known."""
        columns = self._columns(index)
        return _label(columns), _source(columns)

    def name(self, index: int) -> str:
        """Return a sample's shard, its number in there, and its source file, if known."""
        shard_index, number = self._locate(index)
        try:
            source = _source(self._columns(index))
        except UserError:  # samples named in errors often cannot be read
            source = ""
        named = f"{self._shard_name(shard_index)}, sample {number}"
        return f"{named} ({source})" if source else named

    def _own_identity(self) -> Identity:
        return self._known

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the index of a sample's shard, and the sample's number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard_index = int(np.searchsorted(self._ends, index, side="right"))
        first = self._ends[shard_index] - self._entries[shard_index].num_samples
        return shard_index, int(index - first)

    def _byte_range(self, index: int) -> ByteRange:
        shard_index, number = self._locate(index)
        return self._shards[shard_index].byte_range(number)

    def _shard_name(self, shard_index: int) -> str:
        """Return a shard's name for messages."""
        return str(self.path / self._entries[shard_index].raw.name)

    def _data(self, index: int) -> Tensor:
        return self._bytes.read(index)

    def _columns(self, index: int) -> dict[str, np.ndarray]:
        """Read a sample and split it into its columns."""
        shard_index, number = self._locate(index)
        columns = self._entries[shard_index].cut(self._data(index).numpy())
        if columns is None:
            raise DamagedSample(
                f"{self._shard_name(shard_index)}, sample {number} is damaged. {self.remedy}"
            )
        return columns

    def _check_manifest(self, description: Description) -> None:
        """Refuse a description whose sizes differ from the index."""
        if description.manifest is None:
            return
        listed = {name: size for name, (size, _) in description.manifest.items()}
        actual = {entry.raw.name: entry.raw.size for entry in self._entries}
        if listed != actual:
            names = sorted(name for name, _ in listed.items() ^ actual.items())
            raise UserError(
                f"{self.path / SIDECAR_NAME} and {INDEX_NAME} disagree about {names[0]}. "
                f"{self.remedy}"
            )


def _label(columns: dict[str, np.ndarray]) -> int:
    label = columns.get("label")
    return -1 if label is None else int(label.view("<i8")[0])


def _source(columns: dict[str, np.ndarray]) -> str:
    return columns["path"].tobytes().decode(errors="replace") if "path" in columns else ""
