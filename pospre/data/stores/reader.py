"""The interface of readers: encoded bytes or features, and a label, per sample."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.data.stores.description import CLASS_NAMES, Identity, Noted, hash_of
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
        mean: mean of each of the W numbers over the data set; empty if not recorded.
    """

    shape: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Visits(NamedTuple):
    """The samples that the ranks of a machine read in every epoch; see ``pospre.data.order``.

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
        max_pixels: pixels of the largest image, if known without reading.
        num_bytes: size of a local data set in bytes, if known without reading.
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

    def labels(self) -> Sequence[int]:
        """Return all labels if that needs no reading of samples; otherwise nothing."""
        return ()

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label, and its file's path in the data set ("" if unknown)."""
        return self.read(index).label, ""

    def identity(self) -> Identity:
        """Return hashes that distinguish this data set, without reading images."""
        known = {**self._own_identity()}
        if self.classes is not None:
            known[CLASS_NAMES] = hash_of(
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
