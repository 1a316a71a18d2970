"""The interface of readers, encoded bytes or features and a label per sample; and a subset of one.

A subset is a number of images per class, or the images of a list. Experiments with few labels use
1 % or 10 % of ImageNet's. Published lists are files with one name per line. Without a list, the
same number of images is drawn from each class, by a seed.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pospre import draws
from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.data.stores.description import Identity, Noted, hash_of
from pospre.data.stores.files import SampleBytes
from pospre.errors import UserError


class DamagedSample(UserError):
    """One sample is damaged; its neighbours may be good."""


class Sample(NamedTuple):
    """One stored sample.

    Attributes:
        encoded: bytes of an image file (``.npy`` included), uint8 (N,); pixels, uint8 (H, W, 3); or
            features, float32 (H, W, 1).
        label: class, or −1 when unknown.
    """

    encoded: Tensor
    label: int


class Features(NamedTuple):
    """Features instead of images: H steps of W numbers.

    Attributes:
        shape: (H, W).
        mean: of each of the W numbers over the data set; empty if not recorded.
    """

    shape: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Visits(NamedTuple):
    """What the ranks of a machine read in every epoch; see ``pospre.data.order``.

    Attributes:
        order: ``"random"`` or ``"windows"``.
        window: samples of a shard group shuffled together in windows.
        shard_groups: number of groups that they visit.
        share: number of these groups that one rank visits.
        parts: indices of the parts in these groups, int64.
    """

    order: str
    window: int
    shard_groups: range
    share: float
    parts: np.ndarray


class Reader(ABC):
    """Thread-safe random access to the samples of a data set.

    Attributes:
        path: the data set on this machine.
        address: its name in messages.
        format: ``"folder"``, ``"ffcv"`` or ``"mds"``.
        classes: class names in order of their label, or None.
        remedy: what to do if a sample cannot be read, for messages.
        features: description of the samples if they are features.
        noted: recorded facts about their pixels if they are images.
        decoding: how images are decoded.
        checksums: ``description.checksum`` of every sample, uint32 (N,), if recorded.
        max_pixels: of the largest image, if known without reading.
        num_bytes: of a local data set, if known without reading.
    """

    path: Path
    format: str
    classes: list[str] | None
    remedy: str
    features: Features | None = None
    noted: Noted | None = None
    decoding: Decoding = RGB
    checksums: np.ndarray | None = None
    max_pixels: int | None = None
    num_bytes: int | None = None
    _bytes: SampleBytes | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Return a sample.

        Raises:
            DamagedSample: this one cannot be used.
            UserError: the file cannot be read.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a sample's name for messages: its file, or its file and index."""

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label, and its file's path in the data set ("" if unknown)."""
        return self.read(index).label, ""

    def identity(self) -> Identity:
        """Return hashes that distinguish this data set, without reading images."""
        known = {**self._own_identity()}
        if self.classes is not None:
            known["names of the classes"] = hash_of(
                name.encode("utf-8", "surrogatepass") for name in self.classes
            )
        if self.checksums is not None:
            known["checksums of the samples"] = hash_of([self.checksums.astype("<u4").tobytes()])
        return known

    def _own_identity(self) -> Identity:
        """Return the hashes available in this format."""
        return {}

    @property
    def address(self) -> str:
        """The data set's name in messages."""
        return str(self.path)

    @property
    def parts(self) -> np.ndarray:
        """Ends of the parts that are fetched whole, int64 (P,); here one, the data set."""
        return np.array([len(self)])

    def prepare(self, visits: Visits) -> None:  # noqa: B027 (most can read in any order)
        """Check that what is read in every epoch can be read; raise a UserError if not."""

    def expect(self, indices: np.ndarray) -> None:
        """Set the samples that will be read from now on, in order: int64 (n,)."""
        if self._bytes is not None:
            self._bytes.expect(indices)

    def heal(self, index: int) -> bool:
        """Repair the cause of a damaged sample if possible; return whether to read it again."""
        return False

    def close(self) -> None:
        """Stop what ``expect`` started; it may be called again."""
        if self._bytes is not None:
            self._bytes.close()


class SubsetReader(Reader):
    """Reads the samples ``indices`` of another reader, renumbered from 0."""

    def __init__(self, whole: Reader, indices: np.ndarray) -> None:
        self._whole, self.indices = whole, indices
        self.path, self.format, self.classes = whole.path, whole.format, whole.classes
        self.remedy, self.features, self.noted = whole.remedy, whole.features, whole.noted
        self.decoding, self.max_pixels = whole.decoding, whole.max_pixels
        self.checksums = None if whole.checksums is None else whole.checksums[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        """Return a sample."""
        return self._whole.read(int(self.indices[index]))

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label and file."""
        return self._whole.about(int(self.indices[index]))

    def name(self, index: int) -> str:
        """Return a sample's name for messages."""
        return self._whole.name(int(self.indices[index]))

    def _own_identity(self) -> Identity:
        chosen = hash_of([self.indices.astype("<i8").tobytes()])
        return {**self._whole.identity(), "chosen samples": chosen}

    def expect(self, indices: np.ndarray) -> None:
        """Set the samples that will be read."""
        self._whole.expect(self.indices[indices])

    def close(self) -> None:
        """Stop what ``expect`` started."""
        self._whole.close()


def subset(reader: Reader, fraction: float, labels: str | None, seed: int) -> Reader:
    """Return a reader of some samples, in order; with 1 and None of all.

    With a ``fraction`` these are n = max(1, round(fraction · samples / classes)) per class, or all
    of a smaller class: a function of the seed and the samples' indices. The text file ``labels``
    has one file per line: its path in the data set, or its bare name.

    Raises:
        UserError: both are given, the images have no labels, or a listed file is missing.
    """
    if labels is None and fraction == 1:
        return reader
    if labels is not None and fraction != 1:
        raise UserError(
            f"label_fraction={fraction:g} and labels={labels} both choose images; give one of them."
        )
    if "://" in reader.address:
        raise UserError(
            f"{reader.address}: subsets of labels need a local data set, because all shards would "
            "be fetched to see all labels. Copy it first."
        )
    about = [reader.about(index) for index in range(len(reader))]
    if labels is None:
        return SubsetReader(reader, _of_each_class(reader, [a for a, _ in about], fraction, seed))
    return SubsetReader(reader, _listed(reader, [name for _, name in about], Path(labels)))


def _of_each_class(reader: Reader, labels: list[int], fraction: float, seed: int) -> np.ndarray:
    label_N = np.array(labels, np.int64)
    if (label_N < 0).any():
        raise UserError(
            f"label_fraction={fraction:g} needs labels, but {reader.address} has none: put the "
            "images into one folder per class."
        )
    count = max(1, round(fraction * len(label_N) / len(np.unique(label_N))))
    index_N = np.arange(len(label_N))
    random_N = draws.bits(draws.sample_keys(seed, 0, index_N, 0, "label_fraction"), 1)[:, 0]
    order = np.lexsort((random_N, label_N))
    starts = np.searchsorted(label_N[order], label_N[order])
    return np.sort(order[index_N - starts < count])


def _listed(reader: Reader, names: list[str], path: Path) -> np.ndarray:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"labels={path} cannot be read ({error}).") from error
    wanted = [line.strip() for line in lines if line.strip()]
    if not wanted:
        raise UserError(f"labels={path} is empty; write one file name per line.")
    if not any(names):
        raise UserError(
            f"labels={path} lists files, but {reader.address} has no names; give the folder of "
            "images, or MDS shards of it."
        )
    bare = [name.rpartition("/")[2] for name in names]
    known = {name: index for index, name in enumerate(bare)}
    twice = {name for index, name in enumerate(bare) if known[name] != index}
    known = {name: index for name, index in known.items() if name not in twice}
    known |= {name: index for index, name in enumerate(names)}
    missing = [name for name in wanted if name not in known]
    if missing:
        where = "is in several folders of" if missing[0] in twice else "is not in"
        raise UserError(
            f"labels={path}: {len(missing)} of its {len(wanted)} files cannot be found; the first, "
            f"{missing[0]}, {where} {reader.address}."
        )
    return np.unique([known[name] for name in wanted])
