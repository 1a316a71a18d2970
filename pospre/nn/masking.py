"""Random masking with a fixed count, and the gathers it needs."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.batch import EPOCH, HIDDEN, INDEX, VISIBLE, Batch
from pospre.errors import UserError

Sampling = Literal["random", "uniform"]
"""How visible patches are drawn: from all patches, or one of every 2×2."""


class Masking(NamedTuple):
    """A split of every sample's slots into visible and hidden.

    Attributes:
        visible: int64 (B, K) indices of the visible slots.
        hidden: int64 (B, N−K) indices of the others.
    """

    visible: Tensor
    hidden: Tensor


def num_visible(
    num_slots: int, mask_ratio: float, *, key: str = "mask_ratio", slots: str = "tokens"
) -> int:
    """Return how many of ``num_slots`` stay: ``int(num_slots·(1 − mask_ratio))`` as in MAE's code.

    This floors a float product, so (100, 0.9) keeps 9 rather than 10, as published runs do.

    Raises:
        UserError: nothing would be left; the message names the ratio ``key`` and what ``slots``
            are.
    """
    visible = int(num_slots * (1 - mask_ratio))
    if visible < 1:
        largest = 1 - 1 / num_slots
        raise UserError(
            f"{key} = {mask_ratio} leaves none of the {num_slots} {slots} visible. "
            f"Use at most {largest:.4f}, or a finer grid (smaller patch, larger image)."
        )
    return visible


def random_masking(keys: Tensor, num_slots: int, visible: int) -> Masking:
    """Choose ``visible`` of ``num_slots`` slots per sample, in random order and without ties.

    ``keys`` are int64 (B,) draw keys, see ``pospre.draws.sample_keys``.
    """
    shuffled = draws.permutation(keys, num_slots)
    return Masking(visible=shuffled[:, :visible], hidden=shuffled[:, visible:])


@dataclass(frozen=True)
class PatchMasking:
    """Random visible patches of ``view``, a function of (seed, epoch, index) alone.

    All methods with random masks share this draw, so they hide the same patches of a sample.

    Attributes:
        grid: (rows, columns) of patches.
        num_visible: K, the patches that stay visible.
        sampling: ``random``, or ``uniform``, one of every 2×2 (Li et al. 2022, UM-MAE).
        cell: (h, w) of the cells, in patches, that are shown or hidden as one.
        in_rows: uniform patches come row by row; if not, in random order.
    """

    grid: tuple[int, int]
    num_visible: int
    sampling: Sampling = "random"
    cell: tuple[int, int] = (1, 1)
    in_rows: bool = False

    @classmethod
    def by_ratio(
        cls,
        owner: str,
        grid: tuple[int, int],
        mask_ratio: float,
        sampling: Sampling = "random",
        *,
        in_rows: bool = False,
        block: int = 1,
    ) -> "PatchMasking":
        """Return the masking that hides ``mask_ratio`` of the squares of ``block``² patches.

        Raises:
            UserError: no patch stays visible, the squares do not fit the grid, or the options
                contradict each other; ``owner`` names the method.
        """
        key = f"{owner}.mask_ratio"
        if sampling == "uniform" and (mask_ratio != 0.75 or any(side % 2 for side in grid)):
            raise UserError(
                f"{owner}.sampling = uniform keeps one patch of every 2×2: {key} must be 0.75, not "
                f"{mask_ratio}, and the grid must be even; it has {grid[0]}×{grid[1]} patches."
            )
        fitting = [side for side in range(1, min(grid) + 1) if not any(n % side for n in grid)]
        if block not in fitting:
            raise UserError(
                f"{owner}.mask_block = {block} does not divide the grid of {grid[0]}×{grid[1]} "
                f"patches. Use one of {', '.join(map(str, fitting))}."
            )
        blocks, slots = math.prod(grid) // block**2, "tokens" if block == 1 else "blocks"
        count = block**2 * num_visible(blocks, mask_ratio, key=key, slots=slots)
        return cls(grid, count, sampling, (block, block), in_rows and sampling == "uniform")

    def draw(self, batch: Batch, seed: int) -> Batch:
        """Return ``view/visible`` (B, K) and ``view/hidden`` (B, N−K)."""
        keys = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "mask")
        if self.sampling == "uniform":
            pick = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "mask/square")
            split = uniform_masking(None if self.in_rows else keys, pick, self.grid)
        else:
            size = math.prod(self.cell)
            cells = math.prod(self.grid) // size
            split = random_masking(keys, cells, self.num_visible // size)
            if size > 1:
                split = Masking(*(cell_patches(part, self.grid, self.cell) for part in split))
        return {VISIBLE: split.visible, HIDDEN: split.hidden}


def uniform_masking(order: Tensor | None, pick: Tensor, grid: tuple[int, int]) -> Masking:
    """Keep one patch of every 2×2 visible (Li et al. 2022, UM-MAE); rows and columns are even.

    ``order`` are int64 (B,) draw keys of the order of squares (None: row-major), ``pick`` those of
    the visible patch in each.
    """
    rows, cols = grid
    index = torch.arange(rows * cols, device=pick.device)
    index = index.view(rows // 2, 2, cols // 2, 2).transpose(1, 2).flatten(2).flatten(0, 1)
    squares = index.expand(len(pick), -1, -1)  # B, squares, 4
    if order is not None:
        squares = index[draws.permutation(order, len(index))]
    first = (draws.uniform(pick, len(index)) * 4).long().unsqueeze(-1)
    turned = (first + torch.arange(4, device=index.device)) % 4
    members = torch.gather(squares, 2, turned)
    return Masking(visible=members[..., 0], hidden=members[..., 1:].flatten(1))


def pooled(tokens_BTD: Tensor, num_prefix: int, class_token: bool) -> Tensor:
    """Return the class token, or the mean of the tokens after the first ``num_prefix``: (B, D)."""
    return tokens_BTD[:, 0] if class_token else tokens_BTD[:, num_prefix:].mean(1)


def others(index_BK: Tensor, num_slots: int) -> Tensor:
    """Return the slots that are not at ``index_BK``, in order: int64 (B, num_slots − K)."""
    order = torch.argsort(slot_mask(index_BK, num_slots), dim=1, stable=True)
    return order[:, : num_slots - index_BK.shape[1]]


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
    """Return the patches of rectangular cells, cell by cell: int64 (B, C·h·w).

    ``cells_BC`` are int64 row-major numbers of cells of (h, w) patches, which divide the grid.
    """
    (_, cols), (high, wide) = grid, cell
    row, col = cells_BC // (cols // wide) * high, cells_BC % (cols // wide) * wide
    down = torch.arange(high, device=cells_BC.device).view(-1, 1)
    right = torch.arange(wide, device=cells_BC.device)
    corner = (row * cols + col)[..., None, None]
    return (corner + down * cols + right).flatten(1)
