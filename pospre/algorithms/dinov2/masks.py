"""The masks of iBOT and DINOv2: rectangular blocks on some of an image's global crops.

Or Franca's cyclic masks, which leave one rectangle. All samples are drawn at once, with a fixed
number of tries, so that nothing waits for the device.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.batch import EPOCH, INDEX, Batch, view_keys
from pospre.errors import UserError
from pospre.nn.cuda_graph import replayed

NUM_CROPS = 2
"""Global crops of an image."""

MaskShape = Literal["blocks", "cyclic"]

_TRIES = 40  # the published loop has no limit; it took at most 27 in 20000 draws
_GIVE_UP = 10  # consecutive failures after which a mask stays smaller than requested
_MIN_AREA = 4
_ASPECTS = (0.3, 1 / 0.3)


class Slots(NamedTuple):
    """A fixed number of patches that fits all masked ones; the rest is padding.

    Attributes:
        patch: int64 (S,), which of all patches of all crops.
        weight: float32 (S,), 1 / the number of masked patches of the crop; 0 for padding.
    """

    patch: Tensor
    weight: Tensor


@dataclass(frozen=True)
class CropMasking:
    """How global crops are masked: which of them, and what share of their patches.

    Every sample masks ``crop_rate`` of its crops, and a masked crop draws its share from ``ratio``.
    The published way (``stratified``) has the same marginals. It masks ``crop_rate`` of all crops
    of the batch, so a sample may have none or two. Each masked crop takes its share from its own
    interval of ``ratio``. That needs fewer padding slots, but a sample's masks then depend on the
    other samples of the batch.
    """

    crop_rate: float
    ratio: tuple[float, float]
    stratified: bool = False
    shape: MaskShape = "blocks"

    def bounds(self, num_samples: int, num_patches: int) -> list[int]:
        """Return the largest count of masked patches of each masked crop."""
        masked = int(NUM_CROPS * num_samples * self.crop_rate)
        low, high = self.ratio
        if not self.stratified:
            return [int(num_patches * high)] * masked
        step = (high - low) / max(masked, 1)
        return [int(num_patches * (low + step * (rank + 1))) for rank in range(masked)]

    def draw(self, batch: Batch, grid: tuple[int, int], seed: int) -> Tensor:
        """Return which patches of the global crops are masked: bool (B, 2, N)."""
        keys = view_keys(batch, NUM_CROPS, seed, f"dinov2/{self.shape}")
        masks = block_masks if self.shape == "blocks" else cyclic_masks
        count = self._stratified if self.stratified else self._per_sample
        counts = count(batch, grid, seed)
        return masks(keys.flatten(), counts.flatten(), grid).unflatten(0, keys.shape)

    def _per_sample(self, batch: Batch, grid: tuple[int, int], seed: int) -> Tensor:
        """Return the counts (B, 2) if each sample masks the same number of crops."""
        first = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "dinov2/masked_crop")
        rank = draws.permutation(first, NUM_CROPS)
        count = draw_counts(view_keys(batch, NUM_CROPS, seed, "dinov2/ratio"), self.ratio, grid)
        return torch.where(rank < int(NUM_CROPS * self.crop_rate), count, 0)

    def _stratified(self, batch: Batch, grid: tuple[int, int], seed: int) -> Tensor:
        """Return the counts (B, 2) as published, stratified over the samples of this batch."""
        num_patches = grid[0] * grid[1]
        words = draws.bits(view_keys(batch, NUM_CROPS, seed, "dinov2/masked_crop"), 1).flatten()
        rank = words.argsort(stable=True).argsort(stable=True)
        bounds = self.bounds(len(batch[INDEX]), num_patches)
        share = draws.uniform(view_keys(batch, NUM_CROPS, seed, "dinov2/ratio"), 1).flatten()
        low, high = self.ratio
        ratio = low + (high - low) * (rank + share) / max(len(bounds), 1)
        limit = torch.zeros_like(rank)
        limit[: len(bounds)] = torch.tensor(bounds).to(rank.device, non_blocking=True)
        counts = torch.minimum((num_patches * ratio).long(), limit[rank])
        return counts.unflatten(0, (-1, NUM_CROPS))


def check_ratio(owner: str, ratio: tuple[float, float], grid: tuple[int, int]) -> None:
    """Raise ``UserError`` if even the largest share of a crop has no patch."""
    if int(grid[0] * grid[1] * ratio[1]) < 1:
        raise UserError(
            f"{owner}.mask_ratio = {list(ratio)} masks none of the {grid[0] * grid[1]} patches of "
            "a global crop. [0.1, 0.5] is published."
        )


def draw_counts(keys: Tensor, ratio: tuple[float, float], grid: tuple[int, int]) -> Tensor:
    """Return the number of masked patches, int64; its share of all is uniform in ``ratio``."""
    num_patches, (low, high) = grid[0] * grid[1], ratio
    share = draws.uniform(keys, 1).squeeze(-1)
    return (num_patches * (low + (high - low) * share)).long().clamp_max(int(num_patches * high))


@replayed
def block_masks(keys_R: Tensor, counts_R: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return masks of ``counts_R`` patches, in rare cases fewer: bool (R, N).

    Rectangles are added one after the other and may overlap (BEiT; iBOT). A block is used if it is
    smaller than the grid on both sides, adds at least one patch and does not add too many. After
    ten failures in a row the mask stays as it is.

    Args:
        keys_R: draw keys.
        counts_R: int64, patches to mask.
        grid: (rows, columns) of patches.
    """
    rows, cols = grid
    largest = max(rows // 2 * cols, 1)
    size, shape, top, left = draws.uniform(keys_R, 4 * _TRIES).unflatten(1, (4, _TRIES)).unbind(1)
    low, high = (math.log(aspect) for aspect in _ASPECTS)
    aspect = (low + (high - low) * shape).exp()
    row, col = (torch.arange(side, device=keys_R.device) for side in grid)
    mask = torch.zeros(len(keys_R), rows, cols, dtype=torch.bool, device=keys_R.device)
    refused = torch.zeros_like(counts_R)
    for i in range(_TRIES):
        limit = (counts_R - mask.sum((1, 2))).clamp_max(largest)
        area = _MIN_AREA + (limit - _MIN_AREA) * size[:, i]
        height, width = (area * aspect[:, i]).sqrt().round(), (area / aspect[:, i]).sqrt().round()
        inside = _span(row, top[:, i], height).unsqueeze(2) & _span(col, left[:, i], width)[:, None]
        added = (inside & ~mask).sum((1, 2))
        taken = (height < rows) & (width < cols) & (added > 0) & (added <= limit)
        taken &= refused < _GIVE_UP
        mask |= inside & taken[:, None, None]
        refused = torch.where(taken, 0, refused + 1)
    return mask.flatten(1)


def _span(cells_G: Tensor, start_R: Tensor, length_R: Tensor) -> Tensor:
    """Return which cells an interval covers, (R, G); ``start_R`` is drawn from [0, 1)."""
    start = (start_R * (len(cells_G) - length_R + 1)).floor().unsqueeze(1)
    return (cells_G >= start) & (cells_G < start + length_R.unsqueeze(1))


def cyclic_masks(keys_R: Tensor, counts_R: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return masks of ``counts_R`` patches, which leave one rectangle: bool (R, N).

    The whole mask is rolled around the grid, so that each place is masked equally often (Franca,
    arXiv 2507.14137). Arguments as of ``block_masks``; fewer than N patches are masked.
    """
    return around_rectangle(draws.uniform(keys_R, 5), counts_R, grid)


def around_rectangle(uniform_R5: Tensor, counts_R: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the masks of ``cyclic_masks`` for uniform draws of aspect, top, left and two rolls.

    The rectangle has the aspect (height / width) that is drawn, or the next that fits the grid. Its
    first cells, row by row, are shown.
    """
    rows, cols = grid
    shape, top, left, down, right = uniform_R5.unbind(-1)
    shown = rows * cols - counts_R
    low, high = (math.log(aspect) for aspect in _ASPECTS)
    aspect = (low + (high - low) * shape).exp()
    aspect = torch.minimum(torch.maximum(aspect, shown / cols**2), rows**2 / shown)
    height = (shown * aspect).sqrt().ceil().clamp_max(rows)
    width = (shown / aspect).sqrt().ceil().clamp_max(cols)
    corner = (top * (rows - height + 1)).floor(), (left * (cols - width + 1)).floor()
    turn = (down * rows).floor(), (right * cols).floor()
    row, col = (  # of each patch in the rectangle, before the roll
        (torch.arange(side, device=start.device) - by[:, None]) % side - start[:, None]
        for side, start, by in zip(grid, corner, turn, strict=True)
    )
    number = row.unsqueeze(2) * width[:, None, None] + col.unsqueeze(1)
    inside = (row.unsqueeze(2) >= 0) & ((col >= 0) & (col < width[:, None])).unsqueeze(1)
    return ~(inside & (number < shown[:, None, None])).flatten(1)


def masked_slots(mask_BVN: Tensor, num_slots: int) -> Slots:
    """Return the indices of the masked patches, in order, and the weights of their losses.

    Args:
        mask_BVN: bool.
        num_slots: S, at least as large as any number of masked patches that can be drawn.
    """
    flat = mask_BVN.flatten()
    patch = flat.to(torch.uint8).argsort(descending=True, stable=True)[:num_slots]
    counts = mask_BVN.sum(-1).clamp_min(1).flatten()
    weight = flat[patch].float() / counts[patch // mask_BVN.shape[-1]]
    return Slots(patch, weight)
