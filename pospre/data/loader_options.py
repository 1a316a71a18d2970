"""A loader's options, their checks, and the order of samples."""

import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from pydantic import PositiveInt

from pospre.data.opening import Source, opened
from pospre.data.order import Runs, deal, epoch_order, groups_of
from pospre.data.reading import Reading
from pospre.data.stores.reader import Reader, Visits
from pospre.data.stores.subset import subset
from pospre.data.threads import default_workers
from pospre.data.views.augment_options import check_used
from pospre.data.views.options import ViewGroup, Views, named_groups
from pospre.errors import UserError

_ONE_CROP = ViewGroup()


@dataclass(eq=False, repr=False)
class LoaderOptions(Reading, Source):
    """Options of a loader.

    Raises:
        UserError: an option of recipes is invalid, by itself or with this data.
        ValueError: another option is invalid.
    """

    _: KW_ONLY
    batch_size: PositiveInt
    """Samples per batch of one rank."""
    views: Views = _ONE_CROP
    """The view groups, as a sequence or by name, as in ``model.views``; default: one random crop of
    224 pixels.
    """
    seed: int = 0
    """The run's seed, for order, boxes and flips."""
    shuffle: bool = True
    """Use a random order in every epoch instead of the stored one."""
    drop_last: bool = True
    """Drop the samples that do not fill a batch of all ranks."""
    rank: int = 0
    """Number of this rank; it is not detected, not even under ``torchrun``."""
    world_size: int = 1
    """Number of ranks. Another number under Composer's Trainer is an error; 1 in a loop with
    several ranks gives a warning.
    """
    nodes: int = 1
    """Number of machines, each with the same number of consecutive ranks."""
    pin_memory: bool = True
    """Put batches into memory that a GPU, if any, copies fastest."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if self.nodes < 1 or self.world_size % self.nodes:
            raise ValueError(f"{self.world_size} ranks cannot be divided among {self.nodes} nodes")
        if not self.drop_last and self.world_size > 1:
            raise ValueError("drop_last=False needs world_size=1: ranks would differ in batches")
        if self.window < self.shard_groups:
            raise UserError(
                f"window is {self.window}; give at least one sample for each of "
                f"{self.shard_groups} shard groups."
            )
        self.groups = [*named_groups(self.views).values()]
        self.threads = default_workers() if self.num_workers is None else self.num_workers
        self.reader = subset(opened(self), self.label_fraction, self.labels, self.seed)
        if self.shard_groups > 1:
            self._check_groups()
        check_used(self, "data.", "order", self.shuffle, "shuffle = False")
        check_used(self, "data.", "window", self.order == "windows", f"order = {self.order}")
        self.parts = self.reader.parts
        if self.shuffle:
            self.reader.prepare(self._visits())
        if self.reader.features is not None:
            self.groups = [_whole_view(group, self.reader) for group in self.groups]

    @property
    def skips_bad(self) -> bool:
        """Whether bad samples are skipped rather than raising an error."""
        return self.bad_samples == "skip"

    @property
    def follows_parts(self) -> bool:
        """Whether the order of samples depends on the data set's parts."""
        return self.shuffle and (self.order == "windows" or self.shard_groups > 1)

    def check_ranks(self, ranks: int) -> None:
        """Raise ``UserError`` unless this many ranks train together; samples would repeat."""
        if self.world_size != ranks:
            raise UserError(
                f"{ranks} ranks train together, but the loader was made for {self.world_size}, so "
                "several get the same samples. Make it with build_loader(…, rank=dist.get_rank(), "
                f"world_size={ranks}), and each rank's part of the batch as batch_size (under "
                "Composer, dist.get_global_rank() of composer.utils)."
            )

    def check_augment(self, views: Mapping[str, ViewGroup]) -> None:
        """Raise ``UserError`` if a group's ``augment`` differs from that in ``views``."""
        for group in self.groups:
            if group.name in views and group.augment != views[group.name].augment:
                raise UserError(
                    f"the loader's view group '{group.name}' has another augment than the model's, "
                    "but the model applies it: make it with the groups, PretrainModel(…, "
                    "views=…), and the loader with views=model.views."
                )

    def keep_parts(self, ends: np.ndarray) -> None:
        """Keep the order of a run that began with another storage, whose parts end at ``ends``."""
        if len(ends) == 0 or ends[-1] != len(self.reader):
            raise UserError(
                f"{self.reader.address} has {len(self.reader)} samples, but the loader's state is "
                f"for {ends[-1] if len(ends) else 0}; give the data set of that state."
            )
        is_other = not np.array_equal(ends, self.parts)
        if is_other and self.rank == 0 and "://" in self.reader.address:
            warnings.warn(
                f"The order stays that of the {len(ends)} parts that the run began with; "
                f"{self.reader.address} has {len(self.reader.parts)}, so more may be fetched.",
                stacklevel=2,
            )
        self.parts = ends

    def epoch_samples(self, epoch: int) -> np.ndarray:
        """Return an epoch's samples in the order visited by all ranks together, (N,)."""
        num_samples = len(self.reader)
        if not self.shuffle:
            order = np.arange(num_samples)
        else:
            order = epoch_order(
                self.seed, epoch, self.parts, self.order, self.window, self.shard_groups
            )
        if self.repeats > 1:  # consecutive within their shard group
            whole = order[: num_samples - num_samples % self.shard_groups].reshape(
                -1, self.shard_groups
            )
            order = np.repeat(whole, self.repeats, axis=0).reshape(-1)[:num_samples]
        return order

    def spread(self, count: int) -> list[int]:
        """Return ``count`` samples, evenly spaced over those that this machine's ranks visit."""
        runs = self._machine_runs()
        ends = np.cumsum(runs.size)
        positions = np.linspace(0, ends[-1] - 1, count).astype(int)
        run = np.searchsorted(ends, positions, side="right")
        return (runs.first[run] + runs.size[run] - ends[run] + positions).tolist()

    def _machine_groups(self) -> range:
        node = self.rank // (self.world_size // self.nodes)
        return groups_of(node, self.nodes, self.shard_groups)

    def _machine_runs(self) -> Runs:
        runs, own = deal(self.seed, self.reader.parts, self.shard_groups), self._machine_groups()
        here = (runs.group >= own.start) & (runs.group < own.stop)
        return Runs(*(values[here] for values in runs))

    def _check_groups(self) -> None:
        if not self.shuffle:
            raise ValueError("shard groups need shuffle=True: the stored order has none")
        global_size = self.batch_size * self.world_size
        if global_size % self.shard_groups:
            raise UserError(
                f"data.shard_groups = {self.shard_groups} does not divide the batch of "
                f"{global_size} samples, which has the same number from each group; change one of "
                "them."
            )
        if "://" not in self.reader.address:
            return  # nothing is fetched
        if len(self.reader.parts) < self.shard_groups:
            raise UserError(
                f"data.shard_groups = {self.shard_groups}, but {self.reader.address} has only "
                f"{len(self.reader.parts)} shards to distribute; set fewer shard groups."
            )
        if self.shard_groups % self.nodes and self.rank == 0:
            warnings.warn(
                f"{self.nodes} machines share data.shard_groups = {self.shard_groups}, so some "
                f"shards are downloaded by several: a multiple of {self.nodes} would avoid this.",
                stacklevel=2,
            )

    def _visits(self) -> Visits:
        """Return the samples that the ranks of this machine will read."""
        groups = self._machine_groups()
        own = groups_of(self.rank, self.world_size, self.shard_groups)
        return Visits(
            order=self.order,
            window=self.window // self.shard_groups,
            shard_groups=groups,
            share=len(own) / len(groups),
            parts=np.unique(self._machine_runs().part),
        )


def _whole_view(group: ViewGroup, reader: Reader) -> ViewGroup:
    """Return a group of whole, unflipped views: features are neither cropped nor mirrored."""
    assert reader.features is not None
    shape = reader.features.shape
    if group.shape != shape:
        raise UserError(
            f"{reader.address} has features of {shape[0]} x {shape[1]}, but the views of "
            f"'{group.name}' are {group.shape[0]} x {group.shape[1]}. Set encoder.image_size: "
            f"{list(shape)}."
        )
    if not group.augment.is_off:
        raise UserError(
            f"{reader.address} has features, but data.views.{group.name}.augment is for images. "
            "Remove it."
        )
    return replace(group, crop="full", flip_rate=0.0)
