"""What DropPos writes when it is alone, at any two ratios."""

from types import SimpleNamespace
from typing import Any

from pospre.algorithms.droppos import DropPos
from pospre.batch import Batch
from pospre.nn.masking import PatchMasking, Sampling


def draw_masks(
    batch: Batch,
    grid: tuple[int, int],
    *,
    mask_ratio: float,
    position_mask_ratio: float,
    seed: int,
    sampling: Sampling = "random",
) -> Batch:
    """Return the visible and the hidden patches, and which keep their position."""
    masking = PatchMasking.by_ratio("droppos", grid, mask_ratio, sampling)
    return draw_known({**batch, **masking.draw(batch, seed)}, position_mask_ratio, seed)


def draw_known(batch: Batch, position_mask_ratio: float, seed: int) -> Batch:
    """Return the batch with the visible patches that keep their position."""
    model: Any = SimpleNamespace(seed=seed)
    DropPos(position_mask_ratio=position_mask_ratio).write(batch, model)
    return batch
