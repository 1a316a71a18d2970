"""What DropPos writes when it is alone, at any two ratios."""

from pospre.algorithms.droppos import draw_known
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
    known = draw_known(batch, masking.num_visible, position_mask_ratio, seed)
    return {**masking.draw(batch, seed), **known}
