"""Pictures made of patches: placing, framing and enlarging them."""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pospre.nn.encoder_interface import patchify, unpatchify
from pospre.output import write_output

FRAME_COLOUR = (70, 200, 120)
FRAME_OPACITY = 0.6
SHORTEST_SIDE = 224  # pixels of a written picture; smaller images are enlarged by integers


class Puzzle(NamedTuple):
    """K patches of each of B pictures, and their places.

    Attributes:
        pixels: uint8 (B, 3, H, W), the source of the patches.
        keep: int64 (B, K), the place of each patch in ``pixels``.
        framed: bool (B, K), patches with a frame.
        asked: bool (B, K), patches whose place is predicted.
        strewn: int64 (B, K), places in the shuffled picture.
        placed: int64 (B, K), predicted places, or the given ones.
        true: int64 (B, K), places in the original image.
    """

    pixels: Tensor
    keep: Tensor
    framed: Tensor
    asked: Tensor
    strewn: Tensor
    placed: Tensor
    true: Tensor


def place_patches(patches_KF: Tensor, places_K: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the uint8 image (3, H, W) with each flat patch (see ``patchify``) at its place.

    Patches at the same place are averaged; empty places are black.
    """
    num_places = grid[0] * grid[1]
    sums = torch.zeros(num_places, patches_KF.shape[1], device=patches_KF.device)
    sums.index_add_(0, places_K, patches_KF.float())
    counts = torch.bincount(places_K, minlength=num_places).clamp_min(1)
    means = (sums / counts[:, None]).round().to(torch.uint8)
    return unpatchify(means[None], grid)[0]


def enlarge(image_HW3: np.ndarray, factor: int) -> np.ndarray:
    """Return a copy with every pixel repeated ``factor`` times in both directions."""
    return np.ascontiguousarray(image_HW3.repeat(factor, axis=0).repeat(factor, axis=1))


def frame_cells(picture_HW3: np.ndarray, patches: list[int], columns: int, side: int) -> None:
    """Tint in place the borders of cells of ``side`` pixels at ``patches``."""
    width = max(1, side // 16)
    border = np.ones((side, side), dtype=bool)
    border[width:-width, width:-width] = False
    for patch in patches:
        row, column = divmod(patch, columns)
        cell = picture_HW3[row * side : (row + 1) * side, column * side : (column + 1) * side]
        mixed = FRAME_OPACITY * np.array(FRAME_COLOUR) + (1 - FRAME_OPACITY) * cell[border]
        cell[border] = mixed.round().astype(np.uint8)


def compose_views(puzzle: Puzzle, original_3HW: Tensor, patch_size: int) -> dict[str, np.ndarray]:
    """Return the three pictures of one image, uint8 (H', W', 3), enlarged by an integer."""
    height, width = puzzle.pixels.shape[1:]
    patches_KF = patchify(puzzle.pixels[None], (patch_size, patch_size))[0, puzzle.keep]
    grid = (height // patch_size, width // patch_size)
    factor = -(-SHORTEST_SIDE // min(height, width))

    def enlarged(pixels_3HW: Tensor) -> np.ndarray:
        return enlarge(pixels_3HW.permute(1, 2, 0).cpu().numpy(), factor)

    views = {"original": enlarged(original_3HW)}
    for name, places_K in (("shuffled", puzzle.strewn), ("reconstructed", puzzle.placed)):
        picture = enlarged(place_patches(patches_KF, places_K, grid))
        frame_cells(picture, places_K[puzzle.framed].tolist(), grid[1], patch_size * factor)
        views[name] = picture
    return views


def save_png(picture_HW3: np.ndarray, path: Path) -> None:
    """Write a picture as ``write_output`` does."""
    buffer = io.BytesIO()
    Image.fromarray(picture_HW3).save(buffer, "PNG", optimize=True)
    write_output(path, buffer.getvalue())
