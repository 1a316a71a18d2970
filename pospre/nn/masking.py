"""Fixed-count random masking and the gathers that go with it."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.batch import EPOCH, INDEX, Batch
from pospre.errors import UserError

Sampling = Literal["random", "uniform"]
"""Of the visible patches: any of the image's, or one of every 2×2."""


class Masking(NamedTuple):
    """A split of every sample's slots into kept and removed ones, in random order.

    Attributes:
        keep: int64 (B, K) indices of the kept slots.
        removed: int64 (B, N−K) indices of the others.
    """

    keep: Tensor
    removed: Tensor


def num_kept(num_slots: int, mask_ratio: float, *, key: str = "mask_ratio") -> int:
    """Return how many of ``num_slots`` stay: ``int(num_slots·(1 − mask_ratio))`` as in MAE's code.

    The floor is of a float product, so (100, 0.9) keeps 9, not 10; published runs depend on it.

    Raises:
        UserError: nothing would be left; ``key`` names the ratio.
    """
    kept = int(num_slots * (1 - mask_ratio))
    if kept < 1:
        largest = 1 - 1 / num_slots
        raise UserError(
            f"{key} = {mask_ratio} leaves none of the {num_slots} tokens visible. "
            f"Use at most {largest:.4f}, or a finer grid (smaller patch, larger image)."
        )
    return kept


def random_masking(keys: Tensor, num_slots: int, kept: int) -> Masking:
    """Keep ``kept`` of ``num_slots`` slots per sample, uniformly and without ties.

    Args:
        keys: int64 (B,) draw keys, see ``pospre.draws.sample_keys``.
        num_slots: N.
        kept: K, the same for every sample, so that shapes never depend on data.
    """
    shuffled = draws.permutation(keys, num_slots)
    return Masking(keep=shuffled[:, :kept], removed=shuffled[:, kept:])


def visible_patches(batch: Batch, num_patches: int, kept: int, seed: int) -> Masking:
    """Draw which ``kept`` patches of every sample stay visible, from (seed, epoch, index) alone.

    Hosts and position algorithms share this draw: the same sample hides the same patches for all.
    """
    keys = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "mask")
    return random_masking(keys, num_patches, kept)


def uniform_patches(
    batch: Batch, grid: tuple[int, int], seed: int, *, shuffled: bool = True
) -> Masking:
    """Keep one patch of every square of 2×2 (Li et al. 2022, UM-MAE).

    Args:
        batch: its epoch and index decide, as in ``visible_patches``.
        grid: (rows, columns), both even.
        seed: of the run.
        shuffled: the squares come in random order; if not, row by row.
    """
    rows, cols = grid
    index = torch.arange(rows * cols, device=batch[INDEX].device)
    index = index.view(rows // 2, 2, cols // 2, 2).transpose(1, 2).flatten(2).flatten(0, 1)
    order, pick = (
        draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, purpose)
        for purpose in ("mask", "mask/square")
    )
    squares = index.expand(len(order), -1, -1)  # B, squares, 4
    if shuffled:
        squares = index[draws.permutation(order, len(index))]
    first = (draws.uniform(pick, len(index)) * 4).long().unsqueeze(-1)
    turned = (first + torch.arange(4, device=index.device)) % 4
    members = torch.gather(squares, 2, turned)
    return Masking(keep=members[..., 0], removed=members[..., 1:].flatten(1))


def check_uniform(owner: str, mask_ratio: float, grid: tuple[int, int]) -> None:
    """Raise ``UserError`` where one patch of every 2×2 cannot be what is visible."""
    if mask_ratio != 0.75 or any(side % 2 for side in grid):
        raise UserError(
            f"{owner}.sampling = uniform keeps one patch of every 2×2: {owner}.mask_ratio must be "
            f"0.75, not {mask_ratio}, and the grid of {grid[0]}×{grid[1]} patches even."
        )


def gather_tokens(tokens_BND: Tensor, index_BK: Tensor) -> Tensor:
    """Return the tokens at ``index_BK``: (B, K, D)."""
    index = index_BK.unsqueeze(-1).expand(-1, -1, tokens_BND.shape[-1])
    return torch.gather(tokens_BND, 1, index)


def scatter_tokens(background_BND: Tensor, index_BK: Tensor, tokens_BKD: Tensor) -> Tensor:
    """Return ``background_BND`` with ``tokens_BKD`` put at ``index_BK`` (out of place)."""
    index = index_BK.unsqueeze(-1).expand_as(tokens_BKD)
    return torch.scatter(background_BND, 1, index, tokens_BKD)


def slot_mask(index_BK: Tensor, num_slots: int) -> Tensor:
    """Return bool (B, num_slots), true at ``index_BK``."""
    mask = torch.zeros(index_BK.shape[0], num_slots, dtype=torch.bool, device=index_BK.device)
    return mask.scatter(1, index_BK, True)


def cell_patches(cells_BC: Tensor, grid: tuple[int, int], cell: tuple[int, int]) -> Tensor:
    """Return the patches of square or oblong cells, cell after cell: int64 (B, C·h·w).

    Args:
        cells_BC: int64 row-major numbers of cells.
        grid: (rows, columns) of patches.
        cell: (h, w) of a cell in patches, which divide rows and columns.
    """
    (_, cols), (high, wide) = grid, cell
    row, col = cells_BC // (cols // wide) * high, cells_BC % (cols // wide) * wide
    down = torch.arange(high, device=cells_BC.device).view(-1, 1)
    right = torch.arange(wide, device=cells_BC.device)
    corner = (row * cols + col)[..., None, None]
    return (corner + down * cols + right).flatten(1)
