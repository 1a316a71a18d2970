"""Two mistakes of a loop that nothing else shows: parts added too late, and samples without number.

Both train without an error, and wrongly.
"""

from collections import Counter, defaultdict
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from pospre.batch import EPOCH, INDEX, Batch
from pospre.errors import UserError

_WRAPPERS: WeakSet[nn.Module] = WeakSet()
_LOOKED_AT = 256
"""Forwards in which the numbers are looked at: on a GPU to look is to wait for it."""
_PIXELS_APART = 997


def _note_wrapper(module: nn.Module, name: str, part: Any) -> None:
    if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
        _WRAPPERS.add(module)


register_module_module_registration_hook(_note_wrapper)


def check_unwrapped(model: nn.Module, owner: str) -> None:
    """Raise ``UserError`` if ``model`` is spread over ranks: what ``owner`` adds, no rank shares.

    The heads would be drawn anew on every rank, and their gradients would not be averaged.
    """
    wrapped = any(part is model for wrapper in _WRAPPERS for part in wrapper.modules())
    if wrapped or isinstance(model, FSDPModule):
        raise UserError(
            f"algorithms.{owner} is attached to a model that DDP or FSDP has wrapped: every rank "
            "would keep other heads. Attach all algorithms first, then wrap the model and make "
            "the optimiser."
        )


class NumberCheck:
    """Looks whether samples' numbers come again within an epoch, with other images."""

    def __init__(self) -> None:
        self.calls = 0
        self.images: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.repeats: Counter[int] = Counter()

    def look(self, batch: Batch) -> None:
        """Raise ``UserError`` if each sample's number has come again twice, with another image.

        Every mask is drawn from index and epoch, so that such images get the same ones. That of a
        few samples is no mistake: samplers fill the last batch up, or draw with replacement.
        """
        images = next((value for key, value in batch.items() if key.endswith("/image")), None)
        if self.calls == _LOOKED_AT or images is None:
            self.images.clear()
            return
        self.calls += 1
        pixels = images.flatten(1)[:, ::_PIXELS_APART].tolist()
        indices = batch[INDEX].tolist()
        for index, epoch, row in zip(indices, batch[EPOCH].tolist(), pixels, strict=True):
            seen, image = self.images[index, epoch], hash(tuple(row))
            self.repeats[index] += bool(seen) and image not in seen
            seen.add(image)
        if all(self.repeats[index] >= 2 for index in indices):
            raise UserError(
                f"three batches of other images have the same '{INDEX}' and '{EPOCH}', from which "
                "every mask is drawn: it would be the same for ever. Give each image its place in "
                "the data set as index (not its place in the batch), and count the epochs; a "
                "sample's repeat within an epoch needs an epoch of its own."
            )
