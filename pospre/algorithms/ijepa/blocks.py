"""The multi-block masks of I-JEPA: four target blocks and a context around them, without loops.

Every sample draws several whole layouts and keeps the first that leaves enough context. Shapes are
therefore constant, and nothing waits for the device.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.errors import UserError

ATTEMPTS = 8
_OFFICIAL_TRIES = 20  # failures after which the published sampler drops one more constraint
_OFFICIAL_MIN_KEEP = 10  # its context blocks have more tokens than this


@dataclass(frozen=True)
class Blocks:
    """The blocks to draw on a grid of tokens.

    Attributes:
        grid: (rows, columns) of tokens.
        num_targets: target blocks per sample.
        target_scale: range of a target block's share of the grid.
        target_ratio: range of its height / width, in tokens.
        context_scale: range of the context block's share of the grid, before targets are cut out.
        target_tokens: tokens of every target block; larger blocks show some of theirs.
        context_tokens: tokens of every context.
    """

    grid: tuple[int, int]
    num_targets: int
    target_scale: tuple[float, float]
    target_ratio: tuple[float, float]
    context_scale: tuple[float, float]
    target_tokens: int
    context_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the grid."""
        return self.grid[0] * self.grid[1]


class BlockMasks(NamedTuple):
    """Which tokens are context and which are targets, sorted.

    Attributes:
        context: int64 (B, K).
        targets: int64 (B, M, T); blocks may overlap one another, never the context.
        failed: int64 (B,), number of layouts that left too little context; ``ATTEMPTS`` if all did.
    """

    context: Tensor
    targets: Tensor
    failed: Tensor


def draw_blocks(keys_B: Tensor, blocks: Blocks) -> BlockMasks:
    """Draw target blocks and contexts of fixed counts, each sample from its own key.

    Scale, ratio and place of every block are independent and uniform; blocks reach every edge. A
    target block larger than ``target_tokens``, or a context larger than ``context_tokens``, shows a
    run of its tokens. The run is in row-major order, starts at a random token and wraps around. A
    sample whose layouts all leave too little context puts its target blocks on one spot and takes
    its context from the whole grid.
    """
    count = blocks.num_targets
    draw = draws.uniform(keys_B, ATTEMPTS * (5 * count + 4)).unflatten(1, (ATTEMPTS, -1))
    target = draw[..., : 5 * count].unflatten(2, (count, 5))  # scale, ratio, top, left, start
    context = draw[..., 5 * count :]  # scale, top, left, start

    size = _block_size(
        target[..., 0], target[..., 1], blocks.target_scale, blocks.target_ratio, blocks
    )
    inside = _placed(size, target[..., 2], target[..., 3], blocks.grid)  # B, attempt, M, N
    room = _block_size(context[..., 0], None, blocks.context_scale, (1.0, 1.0), blocks)
    visible = _placed(room, context[..., 1], context[..., 2], blocks.grid) & ~inside.any(2)

    enough = visible.sum(-1) >= blocks.context_tokens  # B, attempt
    failed = torch.cumprod((~enough).long(), dim=1).sum(1)
    chosen = failed % ATTEMPTS
    rows = torch.arange(len(keys_B), device=keys_B.device)
    inside, visible = inside[rows, chosen], visible[rows, chosen]
    crowded = (failed == ATTEMPTS)[:, None, None]
    inside = torch.where(crowded, inside[:, :1], inside)
    visible = torch.where(crowded[:, 0], ~inside[:, 0], visible)
    return BlockMasks(
        _take(visible, blocks.context_tokens, context[rows, chosen, 3]),
        _take(inside, blocks.target_tokens, target[rows, chosen, :, 4]),
        failed,
    )


def _block_size(
    scale: Tensor,
    ratio: Tensor | None,
    scales: tuple[float, float],
    ratios: tuple[float, float],
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    """Return (height, width) of blocks with the requested tokens that fit into the grid."""
    rows, cols = blocks.grid
    area = torch.floor(blocks.num_tokens * (scales[0] + scale * (scales[1] - scales[0])))
    if ratio is None:  # as the grid is
        fill = (area / blocks.num_tokens).sqrt()
        return (fill * rows).round().clamp(1, rows), (fill * cols).round().clamp(1, cols)
    aspect = ratios[0] + ratio * (ratios[1] - ratios[0])
    least = blocks.target_tokens
    height = (area * aspect).sqrt().round().clamp(-(-least // cols), rows)
    width = torch.maximum((area / aspect).sqrt().round(), torch.ceil(least / height))
    return height, width.clamp(max=cols)


def _placed(
    size: tuple[Tensor, Tensor], top: Tensor, left: Tensor, grid: tuple[int, int], spare: int = 1
) -> Tensor:
    """Return bool (…, N): the tokens of blocks at uniform places, from draws in [0, 1).

    ``spare`` is 1 where a block may touch the far edge, 0 where the published bound keeps it away.
    """
    spans = []
    for length, draw, cells in zip(size, (top, left), grid, strict=True):
        start = torch.floor(draw * (cells - length + spare))
        cell = torch.arange(cells, device=draw.device)
        spans.append((cell >= start[..., None]) & (cell < (start + length)[..., None]))
    return (spans[0][..., :, None] & spans[1][..., None, :]).flatten(-2)


def _take(mask: Tensor, count: int, start: Tensor) -> Tensor:
    """Return the sorted indices (…, count) of a run of the set tokens, which may wrap around.

    Args:
        mask: bool (…, N) with at least ``count`` set.
        count: length of the run.
        start: (…) in [0, 1): where among the set tokens the run begins.
    """
    total = mask.sum(-1, keepdim=True)
    rank = torch.cumsum(mask, -1) - 1
    run = mask & ((rank - torch.floor(start[..., None] * total).long()) % total < count)
    return _indices(run, count)


def _indices(mask: Tensor, count: int) -> Tensor:
    """Return the first ``count`` set indices of bool (…, N)."""
    return torch.argsort(~mask, dim=-1, stable=True)[..., :count]


def draw_official(keys_B: Tensor, blocks: Blocks) -> BlockMasks:
    """Draw masks as I-JEPA's published code does, the whole batch with the same block sizes.

    One uniform number gives a block's scale and ratio; blocks are smaller than the grid, and never
    touch its last row or column. A context of at most ten tokens is drawn again. After every twenty
    failures, one target block fewer is cut out of it, beginning with the last. All are cut to the
    fewest tokens in the batch: contexts lose their bottom. So masks depend on the batch, whose
    first sample's key gives the sizes. Their counts vary from batch to batch, and the host waits
    for the device to read them.
    """
    count = blocks.num_targets
    tries = _OFFICIAL_TRIES * count + 1
    draw = draws.uniform(keys_B, 2 + 2 * count + 2 * tries)
    shared, corner = draw[0, :2].double(), draw[:, 2:].unflatten(1, (-1, 2))
    size = _official_size(shared[0], blocks.target_scale, blocks.target_ratio, blocks)
    room = _official_size(shared[1], blocks.context_scale, (1.0, 1.0), blocks)
    top, left = corner.unbind(-1)
    inside = _placed(size, top[:, :count], left[:, :count], blocks.grid, spare=0)
    visible = _placed(room, top[:, count:], left[:, count:], blocks.grid, spare=0)
    cut = torch.cumsum(inside, 1) > 0  # B, M, N: by the first block, by the first two…
    cut = torch.cat([torch.zeros_like(cut[:, :1]), cut], dim=1)
    constraints = count - torch.arange(tries, device=keys_B.device) // _OFFICIAL_TRIES
    visible = visible & ~cut[:, constraints]
    failed = ((visible.sum(-1) > _OFFICIAL_MIN_KEEP).cumsum(1) == 0).sum(1)
    visible = visible[torch.arange(len(keys_B), device=keys_B.device), failed]
    context_tokens, target_tokens = (int(mask.sum(-1).min()) for mask in (visible, inside))
    return BlockMasks(_indices(visible, context_tokens), _indices(inside, target_tokens), failed)


def _official_size(
    share: Tensor, scales: tuple[float, float], ratios: tuple[float, float], blocks: Blocks
) -> tuple[Tensor, Tensor]:
    """Return (height, width) for a float64 draw in [0, 1)."""
    area = torch.floor(blocks.num_tokens * (scales[0] + share * (scales[1] - scales[0])))
    aspect = ratios[0] + share * (ratios[1] - ratios[0])
    sides = ((area * aspect).sqrt(), (area / aspect).sqrt())
    high, wide = (
        side.round().clamp(max=cells - 1).float()
        for side, cells in zip(sides, blocks.grid, strict=True)
    )
    return high, wide


@cache
def check_blocks(blocks: Blocks, owner: str, *, official: bool) -> None:
    """Raise ``UserError`` for impossible masks, or masks that almost no layout leaves room for."""
    where = f"on a grid of {blocks.grid[0]}×{blocks.grid[1]} tokens"
    if official:
        share = torch.linspace(0, 1, 1001, dtype=torch.float64, device="cpu")
        for scale, ratio in (
            (blocks.target_scale, blocks.target_ratio),
            (blocks.context_scale, (1.0, 1.0)),
        ):
            high, wide = _official_size(share, scale, ratio, blocks)
            if int((high * wide).min()) <= _OFFICIAL_MIN_KEEP:
                raise UserError(
                    f"{owner}.official = true keeps more than {_OFFICIAL_MIN_KEEP} tokens of every "
                    f"block, but some blocks hold {int((high * wide).min())} {where}. Use a finer "
                    "grid (smaller patch, larger image), or official: false."
                )
        return
    smallest = int(blocks.num_tokens * blocks.target_scale[0])
    if smallest < 1:
        raise UserError(
            f"{owner}.target_scale = {list(blocks.target_scale)} leaves target blocks without a "
            f"token {where}. Use a finer grid (smaller patch, larger image), or a larger scale."
        )
    if blocks.target_tokens > smallest:
        raise UserError(
            f"{owner}.target_tokens is {blocks.target_tokens}, but must be from 1 to {smallest}, "
            f"the size of the smallest target block {where}."
        )
    if blocks.context_tokens > blocks.num_tokens - blocks.target_tokens:
        raise UserError(
            f"{owner}.context_tokens is {blocks.context_tokens}, but must be from 1 to less than "
            f"{blocks.num_tokens}, less the targets, {where}. A quarter is the usual choice."
        )
    keys = draws.sample_keys(0, 0, torch.arange(512, device="cpu"), 0, "ijepa/check")
    crowded = float((draw_blocks(keys, blocks).failed == ATTEMPTS).float().mean())
    if crowded > 0.01:
        raise UserError(
            f"{owner}.context_tokens = {blocks.context_tokens} is more than the target blocks "
            f"leave in {crowded:.0%} of the samples, however often they are drawn, {where}. "
            "A quarter of the tokens is the usual choice."
        )
