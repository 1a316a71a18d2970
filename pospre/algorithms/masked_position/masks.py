"""Which global crops have their positions masked, and where: on crosses of patches."""

import torch
from torch import Tensor

from pospre import draws
from pospre.algorithms.dinov2.masks import NUM_CROPS, CropMasking


def cross_order(keys: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the order in which crosses cover a grid: int64 (…, rows·cols); its first n are a mask.

    Crosses (one row and one column) around uniformly drawn centres are added one after the other.
    If only part of a cross still fits, the cells nearest to its centre go first (L1 distance, ties
    in random order). A mask of any count is then a prefix of this order, and no loop over counts is
    needed.

    Args:
        keys: int64 draw keys of any shape, see ``pospre.draws.sample_keys``.
        grid: (rows, columns).
    """
    rows, cols = grid
    # so many centres leave a given row without one once in e^8 draws
    num_crosses = 8 * max(rows, cols)
    draw = draws.uniform(keys, 2 * num_crosses + rows * cols)
    centre_row = (draw[..., :num_crosses] * rows).long()
    centre_col = (draw[..., num_crosses : 2 * num_crosses] * cols).long()
    cell = torch.arange(rows * cols, device=keys.device)
    row, col = cell // cols, cell % cols
    # the number of the cross that covers each cell first; cells that none covers come last
    turn = torch.minimum(_first(centre_row, rows)[..., row], _first(centre_col, cols)[..., col])
    by = turn.clamp_max(num_crosses - 1)
    distance = (centre_row.gather(-1, by) - row).abs() + (centre_col.gather(-1, by) - col).abs()
    rank = turn * (rows + cols) + distance
    return torch.argsort(rank + draw[..., 2 * num_crosses :].double(), dim=-1, stable=True)


def _first(drawn: Tensor, size: int) -> Tensor:
    """Return the first place (…, size) at which each number occurs among ``drawn`` (…, T)."""
    number = drawn.shape[-1]
    found = drawn.unsqueeze(-2) == torch.arange(size, device=drawn.device).unsqueeze(-1)
    place = torch.arange(number, device=drawn.device)
    return torch.where(found, place, number).amin(-1)


def num_free_crops(num_samples: int, masking: CropMasking) -> int:
    """Return how many global crops of this many samples have no content mask."""
    return NUM_CROPS * num_samples - int(NUM_CROPS * num_samples * masking.crop_rate)


def free_crops(content_mask_B2N: Tensor, masking: CropMasking) -> Tensor:
    """Return which global crops have no content mask, bool (B, 2), always equally many.

    (A mask of DINOv2 may come out empty: its crop then still counts as masked.)
    """
    amount = content_mask_B2N.sum(-1)
    # the published masks are distributed over the batch, ours within each sample
    pools = amount.flatten() if masking.stratified else amount
    free = num_free_crops(len(amount) if masking.stratified else 1, masking)
    rank = pools.argsort(dim=-1, stable=True).argsort(dim=-1)
    return (rank < free).view_as(amount)
