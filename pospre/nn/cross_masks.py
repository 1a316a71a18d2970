"""Masks of exact counts in the shape of crosses or blocks, for a whole batch at once."""

import torch
from torch import Tensor

from pospre import draws


def cross_order(keys: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the order in which crosses cover a grid: int64 (…, rows·cols); its first n are a mask.

    Crosses (one row and one column) around uniformly drawn centres are added one after the other.
    When only part of a cross is left to take, the cells nearest to its centre go first (L1
    distance, ties in random order): so a mask of any count is a start of this order, and no loop
    over counts is needed.

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
