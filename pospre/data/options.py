"""What a loader is asked for: refused where it cannot be, with what would do."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from pospre.data.cores import default_workers
from pospre.data.order import check_order
from pospre.data.stores.reader import Reader
from pospre.data.views.plan import ViewGroup
from pospre.errors import UserError, suggestion

_BAD_SAMPLES = ("fail", "skip")
_LEAST = {
    "batch_size": (1, "it must be at least 1"),
    "num_workers": (0, "it counts decoding threads, 0 for none of their own"),
    "repeats": (1, "each sample comes at least once"),
    "tolerance": (0, "give grey levels of 255, 0 for none"),
}


@dataclass(eq=False, repr=False)
class LoaderOptions:
    """What a loader reads and how; ``pospre.data.loader.build_loader`` explains each.

    Raises:
        UserError: something makes no sense, or not with these data.
        ValueError: likewise, of what no recipe says.
    """

    reader: Reader
    _: KW_ONLY
    batch_size: int
    views: Sequence[ViewGroup] = (ViewGroup(),)
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    num_workers: int = field(default_factory=default_workers)
    repeats: int = 1
    rank: int = 0
    world_size: int = 1
    order: str = "random"
    window: int = 16384
    bad_samples: str = "fail"
    tolerance: float = 1.0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if not self.drop_last and self.world_size > 1:
            raise ValueError("drop_last=False needs world_size=1: ranks would differ in batches")
        if len({group.name for group in self.views}) != len(self.views) or not self.views:
            raise ValueError("give one or more view groups, each with its own name")
        for key, (least, meaning) in _LEAST.items():
            value = getattr(self, key)
            if value < least:
                raise UserError(f"{key} is {value}; {meaning}.")
        if self.bad_samples not in _BAD_SAMPLES:
            hint = suggestion(self.bad_samples, _BAD_SAMPLES)
            raise UserError(f"bad_samples '{self.bad_samples}' is unknown.{hint}")
        check_order(self.order, self.window)
        if self.shuffle:
            self.reader.check_order(self.order, self.window)
        if self.reader.features is not None:
            self.views = [_whole_view(group, self.reader) for group in self.views]


def _whole_view(group: ViewGroup, reader: Reader) -> ViewGroup:
    """Return a group of whole, unflipped views, as features are neither cropped nor mirrored."""
    assert reader.features is not None
    shape = reader.features.shape
    if group.shape != shape:
        raise UserError(
            f"{reader.address} holds features of {shape[0]} x {shape[1]}, but the views of "
            f"'{group.name}' are {group.shape[0]} x {group.shape[1]}. Set encoder.image_size: "
            f"{list(shape)}."
        )
    if not group.augment.is_off:
        raise UserError(
            f"{reader.address} holds features, but data.views.{group.name}.augment changes images. "
            "Leave it out."
        )
    return replace(group, crop="full", flip_rate=0.0)
