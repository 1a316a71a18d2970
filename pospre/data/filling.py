"""Fills the rows of a batch: read a sample, decode it once, cut its views."""

import threading
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from crc32c import crc32c

from pospre.batch import EPOCH, INDEX, LABEL, Batch, box_key, flip_key, image_key
from pospre.data.bill import Bill, Laps
from pospre.data.cutting import View, margin, write_views
from pospre.data.decode import DecodeError, OpenedImage
from pospre.data.samples import DamagedSample, Features, Reader, Sample
from pospre.data.views import GroupPlan, ViewGroup, plan_views
from pospre.errors import UserError

BAD_SAMPLES = ("fail", "skip")
_MOST_IN_A_ROW = 1000


class Filler:
    """Writes samples into batches, from several threads at once.

    Attributes:
        bill: where the time went so far.
        bad: why each sample that was left out cannot be used, by index; with ``"skip"`` only.
    """

    def __init__(
        self,
        reader: Reader,
        views: Sequence[ViewGroup],
        *,
        seed: int,
        bad_samples: str,
        tolerance: float,
    ) -> None:
        self.reader = reader
        self.views = tuple(views)
        self.seed = seed
        self.skips_bad = bad_samples == "skip"
        self.pixels_per_pixel = margin(tolerance)
        self.bill = Bill()
        self.bad: dict[int, str] = {}
        self._lock = threading.Lock()

    def fill(self, batch: Batch, plans: list[GroupPlan], rows: range) -> None:
        """Read, decode and cut some samples of a batch, in place.

        Raises:
            UserError: a sample cannot be used and bad samples are not skipped; it is named.
        """
        images = [batch[image_key(plan.group.name)].numpy() for plan in plans]
        boxes = [batch[box_key(plan.group.name)].numpy() for plan in plans]
        index, labels = batch[INDEX].numpy(), batch[LABEL].numpy()
        laps = Laps()
        for row in rows:
            found, image, label = self._open(int(index[row]), laps)
            while True:
                row_plans, plan_row = plans, row
                if found != index[row]:
                    row_plans, plan_row = self._replan(batch, row, found), 0
                try:
                    views = _views(row_plans, plan_row, row, image, images, boxes)
                    write_views(image, views, self.pixels_per_pixel, laps)
                    break
                except DecodeError as error:
                    self.refuse(found, str(error))
                    found, image, label = self._open(found + 1, laps)
            labels[row] = label
        self.bill.add(laps)

    def _open(self, index: int, laps: Laps) -> tuple[int, OpenedImage, int]:
        """Open a sample, or the next one that can be opened where bad ones are skipped."""
        for candidate in range(index, index + _MOST_IN_A_ROW):
            candidate %= len(self.reader)
            if candidate in self.bad:
                continue
            try:
                sample = self.reader.read(candidate)
                laps.lap("read")
                self._check(candidate, sample)
                image = OpenedImage(sample.encoded)
            except DecodeError as error:
                self.refuse(candidate, str(error))
                continue
            except DamagedSample as error:
                if not self.skips_bad:
                    raise
                self._note(candidate, str(error))
                continue
            laps.num_images += 1
            laps.num_bytes += sample.encoded.nbytes
            return candidate, image, sample.label
        raise UserError(
            f"{self.reader.address}: samples from {index} on cannot be used, {_MOST_IN_A_ROW} in a "
            f"row ({len(self.bad)} in all). {self.reader.remedy}"
        )

    def _check(self, index: int, sample: Sample) -> None:
        """Compare a sample with its checksum: a flipped bit mostly gives an image all the same."""
        sums = self.reader.checksums
        if sums is not None and crc32c(sample.encoded.numpy().data) != sums[index]:
            raise DecodeError("its bytes are not those that were written")

    def refuse(self, index: int, reason: str) -> None:
        """Note a sample that cannot be decoded, or raise a UserError about it."""
        text = f"{self.reader.name(index)} cannot be decoded: {reason}."
        if not self.skips_bad:
            raise UserError(
                f"{text} {self.reader.remedy} To train without such samples, set "
                "data.bad_samples: skip."
            )
        self._note(index, text)

    def _note(self, index: int, text: str) -> None:
        with self._lock:
            if index in self.bad:
                return
            self.bad[index] = text
        warnings.warn(f"{text} The next sample takes its place.", stacklevel=2)

    def _replan(self, batch: Batch, row: int, index: int) -> list[GroupPlan]:
        """Put another sample into a row; whatever is drawn for it is its own."""
        batch[INDEX][row] = index
        epoch = batch[EPOCH][row : row + 1].numpy()
        plans = plan_views(self.views, seed=self.seed, epoch=epoch, index=np.array([index]))
        for plan in plans:
            batch[flip_key(plan.group.name)][row] = torch.from_numpy(plan.flips[0])
        return plans


def _views(
    plans: list[GroupPlan],
    plan_row: int,
    row: int,
    image: OpenedImage,
    images: list[np.ndarray],
    boxes: list[np.ndarray],
) -> list[View]:
    """Return where all views of a sample lie in its image and in the batch."""
    return [
        View(cut, pixels[row, view].transpose(1, 2, 0), places[row, view], plan.group.interpolation)
        for plan, pixels, places in zip(plans, images, boxes, strict=True)
        for view, cut in enumerate(plan.cuts(plan_row, image.width, image.height).each())
    ]


def empty_batch(
    plans: list[GroupPlan], epochs: np.ndarray, index: np.ndarray, features: Features | None
) -> Batch:
    """Lay a batch out: pinned where a GPU will fetch it, channels last for the image decoder."""
    channels, dtype = (3, torch.uint8) if features is None else (1, torch.float32)
    pinned = torch.cuda.is_available()
    num = len(index)
    batch = {
        INDEX: torch.from_numpy(index.astype(np.int64)),
        EPOCH: torch.from_numpy(epochs.astype(np.int64)),
        LABEL: torch.full((num,), -1, dtype=torch.int64),
    }
    for plan in plans:
        group = plan.group
        pixels = torch.empty(
            (num, group.count, *group.shape, channels), dtype=dtype, pin_memory=pinned
        )
        batch[image_key(group.name)] = pixels.permute(0, 1, 4, 2, 3)
        batch[box_key(group.name)] = torch.empty((num, group.count, 4), dtype=torch.float32)
        batch[flip_key(group.name)] = torch.from_numpy(plan.flips)
    return batch
