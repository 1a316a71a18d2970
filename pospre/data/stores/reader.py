"""What a reader of any storage format gives: encoded bytes or features, and a label, per sample."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.data.stores.description import Noted
from pospre.data.stores.files import SampleBytes
from pospre.data.stores.identity import Identity, hash_of
from pospre.errors import UserError


class DamagedSample(UserError):
    """One sample is damaged in itself; its neighbours may be good."""


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
    """What a data set of features holds instead of images: H steps of W numbers.

    Attributes:
        shape: (H, W).
        mean: of each of the W numbers over the data set; empty where it is not noted.
        std: likewise.
    """

    shape: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Visits(NamedTuple):
    """What the ranks of a machine read in every epoch; see ``pospre.data.order``.

    Attributes:
        order: ``"random"`` or ``"windows"``.
        window: samples of a shard group that are shuffled together in windows.
        shard_groups: that they visit.
        share: of these shard groups, which one rank visits.
        parts: numbers of the parts that lie in these shard groups, int64.
    """

    order: str
    window: int
    shard_groups: range
    share: float
    parts: np.ndarray


class Reader(ABC):
    """Random access to the samples of a data set; safe to use from several threads.

    Attributes:
        path: the data set on this machine.
        address: what to call it in messages.
        format: ``"folder"``, ``"ffcv"`` or ``"mds"``.
        classes: class names in order of their label, or None.
        remedy: what to do when a sample cannot be read, for messages.
        features: what the samples hold if they are no images.
        noted: what is known of their pixels if they are.
        decoding: what is made of these.
        checksums: ``description.checksum`` of every sample, uint32 (N,), where the converter noted
            them.
        max_pixels: of the largest image, where it is known without reading them.
        num_bytes: of a data set on this machine's disks, where it is known at once.
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
        """Return what to call a sample in messages: its file, or its file and place."""

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label, and its file's path in the data set ("" if not known)."""
        return self.read(index).label, ""

    def identity(self) -> Identity:
        """Return what tells this data set from others; no images are read."""
        known = {**self._own_identity()}
        if self.classes is not None:
            known["names of the classes"] = hash_of(
                name.encode("utf-8", "surrogatepass") for name in self.classes
            )
        if self.checksums is not None:
            known["checksums of the samples"] = hash_of([self.checksums.astype("<u4").tobytes()])
        return known

    def _own_identity(self) -> Identity:
        """Return the hashes that this format has at hand."""
        return {}

    @property
    def address(self) -> str:
        """What to call the data set in messages."""
        return str(self.path)

    @property
    def parts(self) -> np.ndarray:
        """Ends of the parts that are fetched whole, int64 (P,): here one, the data set."""
        return np.array([len(self)])

    def prepare(self, visits: Visits) -> None:  # noqa: B027 (most can read in any order)
        """Hear what is read in every epoch; raise a UserError where that cannot go well."""

    def expect(self, indices: np.ndarray) -> None:
        """Hear which samples will be read from now on, in order: int64 (n,); replaces the last."""
        if self._bytes is not None:
            self._bytes.expect(indices)

    def heal(self, index: int) -> bool:
        """Look for the cause of a damaged sample; tell whether it is worth reading again."""
        return False

    def close(self) -> None:
        """End what ``expect`` started; it may be called again."""
        if self._bytes is not None:
            self._bytes.close()
