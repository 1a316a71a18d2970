"""Pictures made of patches: cutting, placing, framing, enlarging."""

import numpy as np
import torch
from torch import Tensor

FRAME_COLOUR = (70, 200, 120)
FRAME_OPACITY = 0.6


def split_patches(image_3HW: Tensor, side: int) -> Tensor:
    """Return the patches (N, 3, side, side) of an image, row by row."""
    patches = image_3HW.unfold(1, side, side).unfold(2, side, side)
    return patches.permute(1, 2, 0, 3, 4).flatten(0, 1)


def place_patches(patches_K3PP: Tensor, places_K: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the uint8 image (3, H, W) with each patch at its place.

    Patches in one place are averaged; empty places are black.
    """
    (rows, columns), side = grid, patches_K3PP.shape[-1]
    sums = torch.zeros(rows * columns, *patches_K3PP.shape[1:], device=patches_K3PP.device)
    sums.index_add_(0, places_K, patches_K3PP.float())
    counts = torch.bincount(places_K, minlength=rows * columns).clamp_min(1)
    means = (sums / counts[:, None, None, None]).round().to(torch.uint8)
    mosaic = means.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4)
    return mosaic.reshape(3, rows * side, columns * side)


def enlarge(image_HW3: np.ndarray, factor: int) -> np.ndarray:
    """Return a copy with every pixel repeated ``factor`` times both ways."""
    return np.ascontiguousarray(image_HW3.repeat(factor, axis=0).repeat(factor, axis=1))


def frame_cells(picture_HW3: np.ndarray, places: list[int], columns: int, side: int) -> None:
    """Tint, in place, the border of the cells of ``side`` pixels at ``places``."""
    width = max(1, side // 16)
    border = np.ones((side, side), dtype=bool)
    border[width:-width, width:-width] = False
    for place in places:
        row, column = divmod(place, columns)
        cell = picture_HW3[row * side : (row + 1) * side, column * side : (column + 1) * side]
        mixed = FRAME_OPACITY * np.array(FRAME_COLOUR) + (1 - FRAME_OPACITY) * cell[border]
        cell[border] = mixed.round().astype(np.uint8)
