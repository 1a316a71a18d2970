"""Detect two silent mistakes of training loops: parts added too late, and repeated sample indices.

Both train without an error, but wrongly.
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
"""Number of forwards in which indices are checked: on a GPU, reading them synchronises."""
_PIXELS_APART = 997


def _note_wrapper(module: nn.Module, name: str, part: Any) -> None:
    if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
        _WRAPPERS.add(module)


register_module_module_registration_hook(_note_wrapper)


def check_unwrapped(model: nn.Module, owner: str) -> None:
    """Raise ``UserError`` if ``model`` is already distributed: ranks would not share new parts.

    Every rank would draw its own heads, and their gradients would not be averaged.
    """
    wrapped = any(part is model for wrapper in _WRAPPERS for part in wrapper.modules())
    if wrapped or isinstance(model, FSDPModule):
        raise UserError(
            f"algorithms.{owner} is attached to a model that DDP or FSDP has already wrapped: each "
            "rank would have its own heads. Attach all algorithms first, then wrap the model and "
            "make the optimiser."
        )


class NumberCheck:
    """Detects sample indices that repeat within an epoch with other images."""

    def __init__(self) -> None:
        self.calls = 0
        self.images: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.repeats: Counter[int] = Counter()

    def look(self, batch: Batch) -> None:
        """Raise ``UserError`` if every sample's index has repeated twice, with another image.

        Masks are drawn from index and epoch, so such images get the same masks. A few repeats are
        fine: samplers pad the last batch or draw with replacement.
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
                f"three batches of different images have the same '{INDEX}' and '{EPOCH}', from "
                "which masks are drawn, so the masks would never change. Give each image its "
                "position in the data set as index (not its position in the batch), and count the "
                "epochs. To repeat a sample within an epoch, use another epoch number."
            )
