"""Fills the rows of a batch: read a sample, decode it once, crop its views."""

import math
import threading
import warnings
import weakref
from collections import defaultdict, deque
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pospre.batch import EPOCH, INDEX, LABEL, Batch, box_key, flip_key, image_key
from pospre.data.decode.bit_depth import DeepRange
from pospre.data.decode.decoder import DecodeError, OpenedImage
from pospre.data.loader_options import LoaderOptions
from pospre.data.stores.description import checksum
from pospre.data.stores.reader import DamagedSample, Reader, Sample
from pospre.data.threads import LoaderTiming, Stopwatch
from pospre.data.views.boxes import hull
from pospre.data.views.crop_plan import GroupPlan, plan_views
from pospre.data.views.decode_crops import (
    DecodePlan,
    Views,
    least_oversampling,
    plan_decoding,
    write_views,
)
from pospre.errors import UserError

_Bad = DecodeError | DamagedSample
_MOST_IN_A_ROW = 1000
_ANY_SIDE = 256
_MOST_OPENED = 4 << 20  # approximate bytes of opened samples that a thread keeps in memory


class BatchMemory:
    """Lends memory, and recycles it when the last tensor in it is deleted.

    With the C library's allocator, each batch takes new memory from the system, or leaves gaps that
    are too small for the next. So at most ``most_kept`` pieces of each size are kept, for this
    object's lifetime: returning them between epochs would leave the same gaps.
    """

    def __init__(self, most_kept: int) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(partial(deque, (), most_kept))
        self._lent: list[weakref.ref[np.ndarray]] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return uninitialised memory, uint8 (num_bytes,).

        It is in use as long as this tensor, or another one on its storage, exists.
        """
        free = self._free[num_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        lent = memory[:]
        # A Ctrl-C during Python code in a callback would be swallowed; this callback runs none. It
        # is called with the dead reference, which ``next`` takes as its default.
        give_back = partial(next, map(free.append, (memory,)))
        self._lent = [reference for reference in self._lent if reference() is not None]
        self._lent.append(weakref.ref(lent, give_back))
        return torch.from_numpy(lent)  # keeps the array until the storage is deleted


class BatchFiller:
    """Writes samples into batches, from several threads at once.

    Attributes:
        bad: by index, why each skipped sample cannot be used; only with ``"skip"``.
    """

    def __init__(self, options: LoaderOptions, timing: LoaderTiming) -> None:
        self.options = options
        self.reader = options.reader
        self.oversampling = least_oversampling(options.tolerance)
        self.timing = timing
        self.bad: dict[int, str] = {}
        self._lock = threading.Lock()

    def fill(self, batch: Batch, plans: list[GroupPlan], rows: range) -> None:
        """Read, decode and crop some samples of a batch, in place.

        Samples are processed in groups that fit into memory: all are read, their views are planned,
        then they are decoded one by one. Decoding evicts other code from the processor's caches; in
        groups, reading and planning are several times faster.

        Raises:
            UserError: a sample cannot be used, and bad samples are not skipped; it names the
                sample.
        """
        labels, watch, outputs = batch[LABEL].numpy(), Stopwatch(), _outputs(batch, plans)
        left, failed = deque(rows), dict[int, _Bad]()
        while left:
            opened = self._open_some(batch, left, failed, watch)
            decodings = [self._plan(plans, row, row, image, outputs) for row, image, _ in opened]
            watch.lap("plan")
            for (row, _, label), decoding in zip(opened, decodings, strict=True):
                try:
                    write_views(decoding, watch)
                except DecodeError as error:
                    failed[row] = error
                else:
                    labels[row] = label
        for row in sorted(failed):
            self._leave_out(int(batch[INDEX][row]), failed[row])
            labels[row] = self._stand_in(batch, row, outputs, watch)
        self.timing.add(watch)

    def _open_some(
        self, batch: Batch, rows: deque[int], failed: dict[int, _Bad], watch: Stopwatch
    ) -> list[tuple[int, OpenedImage, int]]:
        """Read the next samples, as many as fit into memory.

        Return row, image and label of each. Errors of the others go to ``failed``.
        """
        opened, num_bytes = [], 0
        while rows and num_bytes < _MOST_OPENED:
            row = rows.popleft()
            try:
                image, sample = self.open(int(batch[INDEX][row]), watch)
            except (DecodeError, DamagedSample) as error:
                failed[row] = error
                continue
            opened.append((row, image, sample.label))
            num_bytes += image.num_bytes
        return opened

    def _stand_in(self, batch: Batch, row: int, outputs: "_Outputs", watch: Stopwatch) -> int:
        """Fill the row of a bad sample with the next good one; return its label.

        Candidates are tried even if they failed before: damage may affect only some views, and the
        choice must not depend on what this thread or rank has read before.
        """
        first, num_samples = int(batch[INDEX][row]), len(self.reader)
        tries = min(num_samples, _MOST_IN_A_ROW)
        for index in ((first + step) % num_samples for step in range(1, tries)):
            plans = self._replan(batch, row, index)
            try:
                image, sample = self.open(index, watch)
                write_views(self._plan(plans, 0, row, image, outputs), watch)
            except (DecodeError, DamagedSample) as error:
                self._leave_out(index, error)
            else:
                return sample.label
        raise UserError(
            f"{self.reader.address}: samples from {first} on cannot be used, {tries} in a row. "
            f"{self.reader.remedy}"
        )

    def _plan(
        self,
        plans: list[GroupPlan],
        plan_row: int,
        row: int,
        image: OpenedImage,
        outputs: "_Outputs",
    ) -> DecodePlan:
        """Determine the positions of all views of a sample in its image and in the batch."""
        groups = [
            Views(
                plan.crops(plan_row, image.width, image.height),
                pixels[row],
                plan.group.interpolation,
            )
            for plan, pixels in zip(plans, outputs.images, strict=True)
        ]
        relative = [boxes[row] for boxes in outputs.boxes]
        return plan_decoding(image, groups, relative, self.oversampling)

    def load_compiled(self) -> None:
        """Plan some sample's views: numba takes 0.4 s to load the first compiled function."""
        for plan in plan_views(self.options.groups, seed=0, epoch=0, index=np.zeros(1, np.int64)):
            hull(plan.crops(0, _ANY_SIDE, _ANY_SIDE).boxes)

    def check_sample(self, index: int) -> None:
        """Decode a sample in full; raise ``UserError`` if it cannot be used and is not skipped."""
        try:
            image, _ = self.open(index, Stopwatch())
            image.decode()
        except (DecodeError, DamagedSample) as error:
            self._leave_out(index, error)
            return
        if image.deep is not None and image.deep.guessed:
            _say_guessed(self.reader.address, image.deep)

    def open(self, index: int, watch: Stopwatch) -> tuple[OpenedImage, Sample]:
        """Return a sample, opened and as stored; if its bytes are damaged, try to get them again.

        Raises:
            DecodeError, DamagedSample: it cannot be used.
        """
        try:
            return self._open_stored(index, watch)
        except (DecodeError, DamagedSample):
            if not self.reader.heal(index):
                raise
            return self._open_stored(index, watch)

    def _open_stored(self, index: int, watch: Stopwatch) -> tuple[OpenedImage, Sample]:
        """Read a sample and verify its checksum."""
        sample = self.reader.read(index)
        sums = self.reader.checksums
        if sums is not None and checksum(sample.encoded.numpy().data, sample.label) != sums[index]:
            raise DecodeError("its bytes or its label differ from those written")
        classes = self.reader.classes
        if classes is not None and not -1 <= sample.label < len(classes):
            raise DecodeError(f"its label {sample.label} is not one of the {len(classes)} classes")
        watch.lap("read")
        image = OpenedImage(sample.encoded, self.reader.decoding)
        watch.lap("decode")  # complete, unless it is a JPEG
        watch.num_bytes += sample.encoded.nbytes
        return image, sample

    def _leave_out(self, index: int, error: _Bad) -> None:
        """Record a sample that cannot be used, or raise a UserError."""
        text = str(error)
        if isinstance(error, DecodeError):
            text = f"{self.reader.name(index)} cannot be decoded: {error}."
        if not self.options.skips_bad:
            remedy = f" {self.reader.remedy}" if isinstance(error, DecodeError) else ""
            raise UserError(
                f"{text}{remedy} To train without such samples, set data.bad_samples: skip."
            ) from error
        with self._lock:
            if index in self.bad:
                return
            self.bad[index] = text
        warnings.warn(f"{text} The next sample takes its place.", stacklevel=2)

    def _replan(self, batch: Batch, row: int, index: int) -> list[GroupPlan]:
        """Put another sample into a row, with its own draws."""
        batch[INDEX][row] = index
        epoch = batch[EPOCH][row : row + 1].numpy()
        views, seed = self.options.groups, self.options.seed
        plans = plan_views(views, seed=seed, epoch=epoch, index=np.array([index]))
        for plan in plans:
            batch[flip_key(plan.group.name)][row] = torch.from_numpy(plan.flips[0])
        return plans


def _say_guessed(address: str, span: DeepRange) -> None:
    warnings.warn(
        f"{address} has images of more than 8 bits; in one of them the values {span} become 0 to "
        "255. This is a guess from its largest value, and others may get another range. To use one "
        "range for all: data.deep_range: [LOW, HIGH].",
        stacklevel=2,
    )


class _Outputs(NamedTuple):
    """Views of a batch to write, channels last, and their boxes, for every view group."""

    images: list[np.ndarray]
    boxes: list[np.ndarray]


def _outputs(batch: Batch, plans: list[GroupPlan]) -> _Outputs:
    names = [plan.group.name for plan in plans]
    images = [batch[image_key(name)].permute(0, 1, 3, 4, 2).numpy() for name in names]
    return _Outputs(images, [batch[box_key(name)].numpy() for name in names])


def empty_batch(
    plans: list[GroupPlan],
    epochs: np.ndarray,
    index: np.ndarray,
    reader: Reader,
    memory: BatchMemory | None,
) -> Batch:
    """Allocate a batch, channels last for the image decoder.

    Views are in ``memory``; None: in pinned memory, which a GPU copies fastest and torch recycles.
    """
    channels, dtype = reader.decoding.channels, torch.uint8
    if reader.features is not None:
        channels, dtype = 1, torch.float32
    num = len(index)
    batch = {
        INDEX: torch.from_numpy(index.astype(np.int64)),
        EPOCH: torch.from_numpy(epochs.astype(np.int64)),
        LABEL: torch.full((num,), -1, dtype=torch.int64),
    }
    for plan in plans:
        group = plan.group
        shape = (num, group.count, *group.shape, channels)
        if memory is None:
            pixels = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            pixels = memory.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        batch[image_key(group.name)] = pixels.permute(0, 1, 4, 2, 3)
        batch[box_key(group.name)] = torch.empty((num, group.count, 4), dtype=torch.float32)
        batch[flip_key(group.name)] = torch.from_numpy(plan.flips)
    return batch
