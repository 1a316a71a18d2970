"""Operations on square token maps: windows, 2×2 squares, and token places."""

import torch
from torch import Tensor


def squares(map_BHWC: Tensor) -> Tensor:
    """Return (B, H/2, W/2, 2, 2, C): the tokens of each 2×2 square."""
    rows, cols = map_BHWC.shape[1] // 2, map_BHWC.shape[2] // 2
    return map_BHWC.unflatten(2, (cols, 2)).unflatten(1, (rows, 2)).transpose(2, 3)


def cut(map_BHWC: Tensor, window: int) -> Tensor:
    """Cut a map into windows: (B·windows, window², C)."""
    count = map_BHWC.shape[1] // window
    parts = map_BHWC.unflatten(2, (count, window)).unflatten(1, (count, window))
    return parts.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def join(windows_WTC: Tensor, side: int, window: int) -> Tensor:
    """Undo ``cut`` for a square map of ``side`` tokens."""
    count = side // window
    parts = windows_WTC.unflatten(0, (-1, count, count)).unflatten(3, (window, window))
    return parts.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def shift_mask(side: int, window: int, shift: int) -> Tensor:
    """Return (windows, T, T): −inf between parts of a window that are not neighbours, else 0."""
    steps = torch.arange(side)
    region = (steps >= side - window).long() + (steps >= side - shift).long()
    regions = cut((3 * region.unsqueeze(1) + region)[None, :, :, None], window).squeeze(-1)
    apart = regions.unsqueeze(1) != regions.unsqueeze(2)
    return torch.zeros(apart.shape).masked_fill(apart, -torch.inf)


def spread(parts_BKSSC: Tensor, side: int) -> Tensor:
    """Arrange K = side² patches of S×S tokens as a map: (B, side·S, side·S, C)."""
    rows = parts_BKSSC.unflatten(1, (side, side)).transpose(2, 3)
    return rows.flatten(3, 4).flatten(1, 2)


def inner_places(places_BK3: Tensor, per_side: int) -> Tensor:
    """Return the places of the tokens within patches: (B, K, S, S, 3)."""
    steps = torch.arange(per_side, device=places_BK3.device, dtype=places_BK3.dtype)
    row, col = torch.meshgrid(steps, steps, indexing="ij")
    inner = torch.stack([row, col, torch.zeros_like(row)], dim=-1)
    known = places_BK3[..., 2:]
    scale = places_BK3.new_tensor([per_side, per_side, 1])
    return (places_BK3 * scale)[:, :, None, None] + inner * known[:, :, None, None]


def merged_places(map_BHW3: Tensor) -> Tensor:
    """Return the places after 2×2 merging; known if all four are known and form one square."""
    four = squares(map_BHW3).flatten(3, 4)
    cell = (four[..., :2] / 2).floor()
    together = (cell == cell[..., :1, :]).all(-1).all(-1) & (four[..., 2] > 0).all(-1)
    merged = torch.cat([cell[..., 0, :], torch.ones_like(cell[..., 0, :1])], dim=-1)
    return merged * together.unsqueeze(-1)
