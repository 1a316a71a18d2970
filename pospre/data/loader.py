"""The loader: from a data set to batches of views, decoded by threads.

Every image is decoded once for all its views (``pospre.data.views.decode_crops``).

The samples of batch b in an epoch, and all boxes and flips, are functions of (seed, epoch, index)
alone. They do not depend on storage format, number of threads or skipped samples. With repeated
augmentation (Hoffer et al. 2020, as in DeiT) a sample comes several times in a row, each time with
its own draws. An epoch is then the first N of this order. Features (``Reader.features``) are not
cropped.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pospre.arguments import taking
from pospre.batch import Batch
from pospre.data.batch_filler import BatchFiller, BatchMemory, empty_batch
from pospre.data.loader_options import LoaderOptions
from pospre.data.order import rank_visits
from pospre.data.stores.description import Identity
from pospre.data.threads import LoaderTiming, Stopwatch, one_thread, thread_pool
from pospre.data.views.crop_plan import plan_views
from pospre.errors import UserError

_CHUNK = 16  # samples per task: enough to plan together, few enough to balance threads
_MIN_PREFETCH = 2


@dataclass
class _Position:
    """Position of an iteration: its epoch, and the number of samples given to all ranks."""

    epoch: int
    samples: int = 0
    begun: bool = False


class ViewLoader(LoaderOptions):
    """Iterates over one rank's batches of an epoch; made by ``build_loader``.

    Every iteration is an epoch: ``for epoch in range(10): for batch in loader: …`` draws new orders
    and views ten times. An interrupted iteration counts too; the next one starts the next epoch. To
    resume where it stopped, pass ``state_dict()`` to ``load_state_dict``. A Composer Trainer
    without our callbacks resumes like this as well: it starts and leaves one iteration per finished
    epoch.

    Only one iteration runs at a time: a later one takes over the prefetching and the position.

    Attributes:
        num_samples: size of the whole data set.
        classes: class names in order of their label, or None.
        pinned: whether batches are in memory that a GPU can copy directly.
        timing: time per stage, over all iterations so far.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_samples = len(self.reader)
        self.classes = self.reader.classes
        self.pinned = self.pin_memory and torch.cuda.is_available()
        self.timing = LoaderTiming()
        self._filler = BatchFiller(self, self.timing)
        self._memory = None if self.pinned else BatchMemory(self.num_batches_held)
        self._position = self._reading = _Position(0)
        if len(self) == 0:
            raise UserError(
                f"{self.reader.address} has {self.num_samples} samples, fewer than one batch of "
                f"{self._global_size}; lower batch_size."
            )

    @cached_property
    def identity(self) -> Identity:
        """Hashes that identify the data set, by what they are of."""
        return self.reader.identity()

    @property
    def bad(self) -> dict[int, str]:
        """By index, why each skipped sample cannot be used (on this rank)."""
        return self._filler.bad

    @property
    def num_batches_held(self) -> int:
        """Number of batches in memory: those in preparation and the one in use."""
        return self._prefetch + 2

    @property
    def _prefetch(self) -> int:
        if self.threads == 0:
            return 0
        tasks = -(-self.batch_size // _CHUNK)
        return _MIN_PREFETCH + -(-self.threads // tasks)

    @property
    def _global_size(self) -> int:
        return self.batch_size * self.world_size

    @property
    def epoch(self) -> int:
        """The epoch being iterated over; before the first batch and after the last, the next one.

        Setting it, even to its current value, makes the next iteration start this epoch.
        """
        return self._position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._position = _Position(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: the epoch, and the number of samples given to all ranks.

        It is valid for any number of ranks, batch size (a multiple of ``shard_groups``) and storage
        format. If the order depends on the parts of the data set, it includes their ends.
        """
        state = {"epoch": self._position.epoch, "samples": self._position.samples}
        return {**state, "parts": self.parts.tolist()} if self.follows_parts else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the samples counted in ``state_dict``, without reading these.

        If the state's epoch is complete, the next iteration yields nothing, and the one after it
        the next epoch. If the state has parts, the order follows these rather than this data set's.

        Raises:
            UserError: the state does not fit a data set of this size, or is not a loader's.
        """
        if not {"epoch", "samples"} <= state.keys() or state["samples"] > self.num_samples:
            raise UserError(
                f"{self.reader.address} has {self.num_samples} samples, but the loader's state is "
                f"{dict(state)}; give the state_dict() of a loader of this data."
            )
        if self.follows_parts and "parts" in state:
            self.keep_parts(np.array(state["parts"], dtype=np.int64))
        self._position = _Position(state["epoch"], state["samples"])

    def file_name(self, index: int) -> str:
        """Return the file of sample ``index``, relative to the data set's folder.

        MDS shards keep it if ``data_prep`` wrote them. "" where it is not known, as in a
        ``.beton``.
        """
        return self.reader.about(index)[1]

    def probe(self, num_samples: int = 4) -> None:
        """Decode a few samples spread over the visited ones, to detect damage early.

        Raises:
            UserError: one cannot be used, and bad samples are not skipped; it names the sample.
        """
        for index in self.spread(num_samples):
            self._filler.check_sample(index)

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""
        if self.drop_last:
            return self.num_samples // self._global_size
        return -(-self.num_samples // self._global_size)

    def __iter__(self) -> Iterator[Batch]:
        if self._position.begun:
            self._position = _Position(self.epoch + 1)
        if self.world_size == 1 and self.shuffle and self.drop_last and dist.is_initialized():
            try:
                self.check_ranks(dist.get_world_size())
            except UserError as error:  # this rank may be the only one that fails, or all may
                warnings.warn(str(error), stacklevel=2)
        self._position.begun = True
        return self._batches(self._position)

    def _batches(self, position: _Position) -> Iterator[Batch]:
        epoch, start = position.epoch, position.samples
        order = self.epoch_samples(epoch)
        count = len(order) - start
        count -= count % self._global_size if self.drop_last else 0
        visits = start + rank_visits(
            count, self.rank, self.world_size, self.batch_size, self.shard_groups
        )
        # close the reader first: otherwise a thread that waits for a download would not end
        with thread_pool(self.threads) as pool, self._expecting(order[visits], position):
            self._filler.load_compiled()  # while the first shards are being downloaded
            pending = deque[_Pending]()
            for first in range(0, len(visits), self.batch_size):
                batch_visits = visits[first : first + self.batch_size]
                pending.append(self._start(pool, epoch, order[batch_visits], batch_visits))
                if len(pending) > self._prefetch:
                    yield self._deliver(pending.popleft(), position)
            while pending:
                yield self._deliver(pending.popleft(), position)
        if position is self._position:
            self.epoch += 1

    @contextmanager
    def _expecting(self, indices: np.ndarray, position: _Position) -> Iterator[None]:
        """Prefetch in the reader, until the end or until a later iteration starts."""
        self._reading = position
        self.reader.expect(indices)
        try:
            yield
        finally:
            if self._reading is position:
                self.reader.close()

    def _start(
        self, pool: ThreadPoolExecutor | None, epoch: int, index: np.ndarray, visits: np.ndarray
    ) -> "_Pending":
        """Draw boxes and flips, allocate the batch, and hand its samples to the threads."""
        watch = Stopwatch()
        # a repeat draws like another epoch, including masks and colours
        epochs = epoch * self.repeats + visits // self.shard_groups % self.repeats
        plans = plan_views(self.groups, seed=self.seed, epoch=epochs, index=index)
        batch = empty_batch(plans, epochs, index, self.reader, self._memory)
        watch.lap("plan")
        self.timing.add(watch)
        fill, size = self._filler.fill, len(index)
        chunks = [range(begin, min(begin + _CHUNK, size)) for begin in range(0, size, _CHUNK)]
        if pool is not None:
            return batch, [pool.submit(fill, batch, plans, rows) for rows in chunks]
        with one_thread():  # as in the loader's own threads
            for rows in chunks:
                fill(batch, plans, rows)
        return batch, []

    def _deliver(self, pending: "_Pending", position: _Position) -> Batch:
        watch = Stopwatch()
        batch, tasks = pending
        for task in tasks:
            task.result()  # raises what a thread raised
        watch.lap("wait")
        self.timing.add(watch)
        position.samples = min(position.samples + self._global_size, self.num_samples)
        return batch


_Pending = tuple[Batch, list[Future[None]]]  # a batch and the tasks that write its views


@taking(ViewLoader)
def build_loader(loader: ViewLoader) -> ViewLoader:
    """Open a data set and return its loader.

    For any training code::

        loader = build_loader("photos", batch_size=64)
        for epoch in range(10):
            for batch in loader:
                pixels, labels = batch["view/image"], batch["label"]

    ``len(loader)`` is the number of batches in an epoch, ``loader.num_samples`` the size of the
    data set, ``loader.classes`` the names of its labels. A batch is a dict of tensors for B
    samples, with V views for each group ``g`` of ``views`` (one, called ``view``):
    - ``index`` int64 (B,): the samples' indices in the data set;
    - ``epoch`` int64 (B,): the epoch of their draws;
    - ``label`` int64 (B,): their classes, −1 if there are none;
    - ``g/image`` uint8 (B, V, 3, H, W): RGB pixels, channels last in memory, not mirrored yet;
    - ``g/box`` float32 (B, V, 4): x0, y0, x1, y1 of the views as fractions of the upright image;
    - ``g/flip`` bool (B, V): the views to mirror.

    Raises:
        UserError: the data set cannot be read or is smaller than one batch, or an option is
            unknown.
    """
    return loader
