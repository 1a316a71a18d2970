"""The loader: from a data set to batches of views, decoded by threads.

Which samples form batch b of an epoch, and every box and flip, follow from (seed, epoch, index)
alone. Storage format, number of threads and what was skipped change nothing. With repeated
augmentation (Hoffer et al. 2020, as in DeiT) a sample comes several times in a row, each time with
draws of its own; an epoch then holds the first N of that order. Features (``Reader.features``) come
whole.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pospre import draws
from pospre.batch import EPOCH, INDEX, LABEL, Batch, box_key, flip_key, image_key
from pospre.data.cores import available_cores
from pospre.data.decode import DecodeError, cut_view, decode_image
from pospre.data.reader import open_reader
from pospre.data.samples import Features, Reader
from pospre.data.views import GroupPlan, ViewGroup, plan_views
from pospre.errors import UserError

_CHUNK = 4  # samples per task: large enough to hide a task's cost, small enough to share evenly
_MIN_PREFETCH = 2


@dataclass
class _PendingBatch:
    """A batch whose views are being written by the threads."""

    batch: Batch
    tasks: list[Future[None]]

    def result(self) -> Batch:
        for task in self.tasks:
            task.result()
        return self.batch


class ViewLoader:
    """Iterates over one rank's batches of an epoch; see ``pospre.batch`` for what they hold.

    Attributes:
        epoch: epoch of the next iteration, set by whoever trains. Iterating again without setting
            it repeats the same batches.
        skip: batches to leave out at the start of the next iteration, without reading them; falls
            back to 0 when that iteration starts.
        num_samples: size of the whole data set.
        batch_size: samples per batch of this rank.
        repeats: how many times in a row each sample comes.
        classes: class names in order of their label, or None.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        views: Sequence[ViewGroup],
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int | None = None,
        repeats: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        if not drop_last and world_size > 1:
            raise ValueError("drop_last=False needs world_size=1: ranks would differ in batches")
        if len({group.name for group in views}) != len(views) or not views:
            raise ValueError("give one or more view groups, each with its own name")
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
        if num_workers is not None and num_workers < 1:
            raise UserError(
                f"num_workers is {num_workers}; it counts decoding threads, at least 1."
            )
        if repeats < 1:
            raise UserError(f"repeats is {repeats}; each sample comes at least once.")
        self.reader = reader
        self.views = tuple(views)
        if reader.features is not None:
            self.views = tuple(_whole(group, reader) for group in views)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers or _default_workers()
        self.repeats = repeats
        self.rank = rank
        self.world_size = world_size
        self.num_samples = len(reader)
        self.classes = reader.classes
        self.epoch = 0
        self.skip = 0
        if len(self) == 0:
            raise UserError(
                f"{reader.path} holds {self.num_samples} samples, fewer than one batch of "
                f"{batch_size * world_size}; lower the batch size."
            )

    def probe(self, num_samples: int = 4) -> None:
        """Decode a few samples from all over the data set, to find out early that it is damaged.

        Raises:
            UserError: one of them cannot be read; it is named.
        """
        for index in np.linspace(0, self.num_samples - 1, num_samples).astype(int).tolist():
            self._decode(index)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, whatever ``skip`` is."""
        global_size = self.batch_size * self.world_size
        if self.drop_last:
            return self.num_samples // global_size
        return -(-self.num_samples // global_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch, skip = self.epoch, self.skip
        self.skip = 0
        return self._batches(epoch, skip)

    def _batches(self, epoch: int, skip: int) -> Iterator[Batch]:
        if self.shuffle:
            order = draws.order(self.seed, epoch, self.num_samples)
        else:
            order = np.arange(self.num_samples)
        order = np.repeat(order, self.repeats)[: self.num_samples]
        prefetch = _MIN_PREFETCH + -(-self.num_workers * _CHUNK // self.batch_size)
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="pospre-loader")
        pending: deque[_PendingBatch] = deque()
        try:
            for number in range(skip, len(self)):
                pending.append(self._start(pool, epoch, order, self._rank_slice(number)))
                if len(pending) > prefetch:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # also after an early break, an error or Ctrl-C in the consumer
            pool.shutdown(wait=True, cancel_futures=True)

    def _rank_slice(self, number: int) -> slice:
        """Return this rank's part of batch ``number`` in the epoch's order."""
        start = (number * self.world_size + self.rank) * self.batch_size
        return slice(start, start + self.batch_size)

    def _start(
        self, pool: ThreadPoolExecutor, epoch: int, order: np.ndarray, part: slice
    ) -> _PendingBatch:
        """Draw boxes and flips, lay the batch out, and hand its samples to the threads."""
        index = order[part]
        # a repeat draws as if it were an epoch of its own, masks and colours included
        epochs = epoch * self.repeats + np.arange(len(order))[part] % self.repeats
        plans = plan_views(self.views, seed=self.seed, epoch=epochs, index=index)
        batch = _empty_batch(plans, epochs, index, self.reader.features)
        tasks = [
            pool.submit(self._fill, batch, plans, range(start, min(start + _CHUNK, len(index))))
            for start in range(0, len(index), _CHUNK)
        ]
        return _PendingBatch(batch, tasks)

    def _fill(self, batch: Batch, plans: list[GroupPlan], rows: range) -> None:
        """Read and decode some samples of a batch and write their views in place."""
        images = [batch[image_key(plan.group.name)].numpy() for plan in plans]
        boxes = [batch[box_key(plan.group.name)].numpy() for plan in plans]
        index, labels = batch[INDEX].tolist(), batch[LABEL].numpy()
        for row in rows:
            picture, labels[row] = self._decode(index[row])
            height, width = picture.shape[:2]
            for plan, group_images, group_boxes in zip(plans, images, boxes, strict=True):
                for view in range(plan.group.count):
                    cut = plan.cut(row, view, width, height)
                    group_boxes[row, view] = cut.relative(width, height)
                    pixels = group_images[row, view].transpose(1, 2, 0)
                    cut_view(picture, cut, pixels, plan.group.interpolation)

    def _decode(self, index: int) -> tuple[np.ndarray, int]:
        sample = self.reader.read(index)
        try:
            return decode_image(sample.encoded), sample.label
        except DecodeError as error:
            name = self.reader.name(index)
            raise UserError(f"{name} cannot be decoded: {error}. {self.reader.remedy}") from error


def build_loader(
    path: str | Path,
    *,
    views: Sequence[ViewGroup],
    batch_size: int,
    seed: int,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int | None = None,
    repeats: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> ViewLoader:
    """Open a data set and return its loader.

    Args:
        path: image folder, ``.beton`` file or MDS directory.
        views: what to cut out of every image.
        batch_size: samples per batch of one rank.
        seed: the run's seed, for order, boxes and flips.
        shuffle: visit the samples in the epoch's random order instead of the stored one.
        drop_last: leave out the samples that do not fill a batch of all ranks.
        num_workers: decoding threads; by default one per core that this rank may use.
        repeats: how many times in a row each sample comes, in an epoch of the same length.
        rank: number of this rank.
        world_size: number of ranks.

    Raises:
        UserError: the data set cannot be read or is smaller than one batch.
    """
    return ViewLoader(
        open_reader(path),
        views=views,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        repeats=repeats,
        rank=rank,
        world_size=world_size,
    )


def _default_workers() -> int:
    """Return the cores that this process may use, shared among the ranks of this machine."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, available_cores() // num_ranks)


def _whole(group: ViewGroup, reader: Reader) -> ViewGroup:
    """Return a group of whole, unflipped views, as features are neither cropped nor mirrored."""
    assert reader.features is not None
    shape = reader.features.shape
    if group.shape != shape:
        raise UserError(
            f"{reader.path} holds features of {shape[0]} x {shape[1]}, but the views of "
            f"'{group.name}' are {group.shape[0]} x {group.shape[1]}. Set encoder.image_size: "
            f"{list(shape)}."
        )
    if not group.augment.is_off:
        raise UserError(
            f"{reader.path} holds features, but data.views.{group.name}.augment changes images. "
            "Leave it out."
        )
    return replace(group, crop="full", flip_rate=0.0)


def _empty_batch(
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
