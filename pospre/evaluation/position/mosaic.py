"""Pictures made of patches: placing, framing, enlarging."""

import numpy as np
import torch
from torch import Tensor

from pospre.nn.decoder import unpatchify

FRAME_COLOUR = (70, 200, 120)
FRAME_OPACITY = 0.6


def place_patches(patches_KF: Tensor, places_K: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the uint8 image (3, H, W) with each flat patch (see ``patchify``) at its place.

    Patches in one place are averaged; empty places are black.
    """
    num_places = grid[0] * grid[1]
    sums = torch.zeros(num_places, patches_KF.shape[1], device=patches_KF.device)
    sums.index_add_(0, places_K, patches_KF.float())
    counts = torch.bincount(places_K, minlength=num_places).clamp_min(1)
    means = (sums / counts[:, None]).round().to(torch.uint8)
    return unpatchify(means[None], grid)[0]


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
