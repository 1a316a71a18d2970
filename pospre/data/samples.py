"""What a reader of any storage format gives: encoded bytes or features, and a label, per sample."""

import mmap
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pospre.errors import UserError


class DamagedSample(UserError):
    """One sample is damaged in itself; its neighbours may be good."""


class Sample(NamedTuple):
    """One stored sample.

    Attributes:
        encoded: bytes of an image file, uint8 (N,); pixels, uint8 (H, W, 3); or features, float32
            (H, W, 1).
        label: class, or −1 when unknown.
    """

    encoded: Tensor
    label: int


class Features(NamedTuple):
    """What a data set of features holds instead of images: H steps of W numbers.

    Attributes:
        shape: (H, W).
        mean: of each of the W numbers over the data set; empty where nobody noted it.
        std: likewise.
    """

    shape: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Reader(ABC):
    """Random access to the samples of a data set; safe to use from several threads.

    Attributes:
        path: the data set.
        format: ``"folder"``, ``"ffcv"`` or ``"mds"``.
        classes: class names in order of their label, or None.
        remedy: what to do when a sample cannot be read, for messages.
        features: what the samples hold if they are no images.
        checksums: CRC-32C of every sample's bytes, uint32 (N,), where the converter noted them.
        max_pixels: of the largest image, where it is known without reading them.
        num_bytes: of a data set on this machine's disks, where it is known at once.
    """

    path: Path
    format: str
    classes: list[str] | None
    remedy: str
    features: Features | None = None
    checksums: np.ndarray | None = None
    max_pixels: int | None = None
    num_bytes: int | None = None

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

    @property
    def parts(self) -> np.ndarray:
        """Ends of the parts that are fetched whole, int64 (P,): here one, the data set."""
        return np.array([len(self)])

    def check_order(self, order: str, window: int) -> None:  # noqa: B027 (most can do any)
        """Raise a UserError where the samples cannot well be read in this order of an epoch."""

    def expect(self, indices: np.ndarray) -> None:  # noqa: B027 (most readers need not know)
        """Hear which samples will be read from now on, in order: int64 (n,); replaces the last."""

    def close(self) -> None:  # noqa: B027
        """End what ``expect`` started; it may be called again."""


def read_bytes(
    path: Path, offset: int = 0, size: int | None = None, *, keep: bool = True
) -> Tensor:
    """Read a part of a file (the whole by default) as uint8 (size,).

    A plain read, not a memory map: a file cut short while we run is an error, not a crash. Without
    ``keep`` the operating system is told to forget these bytes when they were read.

    Raises:
        UserError: the file cannot be read or is shorter than it was.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            file_size = os.fstat(descriptor).st_size
            size = file_size if size is None else size
            data = torch.empty(size, dtype=torch.uint8)
            view, done = data.numpy().data, 0
            if not keep:  # nor read what lies behind them
                _advise(descriptor, offset, size, "POSIX_FADV_RANDOM")
            while done < size:
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise UserError(
                        f"{path} is cut off: it ends at byte {file_size}, but bytes up to "
                        f"{offset + size} are needed. Copy or convert it again."
                    )
                done += count
            if not keep:
                _advise(descriptor, offset, size, "POSIX_FADV_DONTNEED")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return data


def _advise(descriptor: int, offset: int, size: int, advice: str) -> None:
    """Tell the kernel about a part of a file, where there is a way to (not on macOS)."""
    if hasattr(os, "posix_fadvise"):
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE  # parts of pages would be kept
        end = -(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fadvise(descriptor, start, end - start, getattr(os, advice))
