"""Images with parts taken away or displaced, and encoders told other positions.

Every draw is a function of the seed and of the image's place in its data set.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre import draws
from pospre.batch import INDEX, Batch
from pospre.nn.encoder import Edit
from pospre.nn.masking import num_kept, random_masking, slot_mask

Change = Callable[[Tensor, Batch, int], Tensor]
"""From normalised images (B, C, H, W), their batch and a seed to changed ones."""


class Condition(NamedTuple):
    """What is done to an image, and to the positions that are added to its patches."""

    name: str
    change: Change | None = None
    positions: Edit | None = None


def occlude(images_BCHW: Tensor, batch: Batch, seed: int, *, side: float, anywhere: bool) -> Tensor:
    """Paint a box, ``side`` of the height and of the width, in the mean colour (0).

    It is in the middle, or anywhere in the image.
    """
    high, wide = images_BCHW.shape[-2:]
    tall, broad = round(side * high), round(side * wide)
    room_2 = torch.tensor([high - tall, wide - broad], device=images_BCHW.device)
    corner_B2 = (room_2 // 2).expand(len(images_BCHW), -1)
    if anywhere:
        corner_B2 = (draws.uniform(_keys(batch, seed, "robustness/box"), 2) * (room_2 + 1)).long()
    row_BH = torch.arange(high, device=images_BCHW.device) - corner_B2[:, :1]
    column_BW = torch.arange(wide, device=images_BCHW.device) - corner_B2[:, 1:]
    inside_BH = (row_BH >= 0) & (row_BH < tall)
    inside_BW = (column_BW >= 0) & (column_BW < broad)
    hidden_BHW = inside_BH[:, :, None] & inside_BW[:, None]
    return images_BCHW.masked_fill(hidden_BHW[:, None], 0)


def drop_patches(
    images_BCHW: Tensor, batch: Batch, seed: int, *, grid: tuple[int, int], ratio: float
) -> Tensor:
    """Paint a share of the encoder's patches in the mean colour."""
    patches = grid[0] * grid[1]
    keys = _keys(batch, seed, "robustness/drop")
    masking = random_masking(keys, patches, num_kept(patches, ratio, key="patch_drop"))
    hidden_BN = slot_mask(masking.removed, patches).view(-1, 1, *grid)
    size = images_BCHW.shape[-2:]
    hidden_B1HW = F.interpolate(hidden_BN.float(), size=size, mode="nearest").bool()
    return images_BCHW.masked_fill(hidden_B1HW, 0)


def shuffle_tiles(
    images_BCHW: Tensor, batch: Batch, seed: int, *, tiles: tuple[int, int]
) -> Tensor:
    """Put the tiles of a grid into random order."""
    order_BN = draws.permutation(_keys(batch, seed, "robustness/shuffle"), tiles[0] * tiles[1])
    return reorder_tiles(images_BCHW, order_BN, tiles)


def reorder_tiles(images_BCHW: Tensor, order_BN: Tensor, tiles: tuple[int, int]) -> Tensor:
    """Return images whose i-th of (rows, columns) tiles is the one that was ``order_BN[:, i]``."""
    cut = images_BCHW.unflatten(3, (tiles[1], -1)).unflatten(2, (tiles[0], -1))
    cut = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # B, tiles, C, h, w
    rows = torch.arange(len(cut), device=cut.device).unsqueeze(1)
    mixed = cut[rows, order_BN].unflatten(1, tiles)
    return mixed.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def shift_positions(positions_BND: Tensor, *, grid: tuple[int, int], by: int) -> Tensor:
    """Give every patch the position ``by`` rows below and columns to the right, round the edges."""
    grid_BHWD = positions_BND.unflatten(1, grid)
    return grid_BHWD.roll((-by, -by), (1, 2)).flatten(1, 2)


def scale_positions(
    positions_BND: Tensor, *, grid: tuple[int, int], by: float, mode: str = "bilinear"
) -> Tensor:
    """Give the patches the positions of the image's middle, ``by`` of each side."""
    grid_BDHW = positions_BND.unflatten(1, grid).movedim(3, 1).float()
    theta = grid_BDHW.new_tensor([[by, 0, 0], [0, by, 0]]).expand(len(grid_BDHW), -1, -1)
    places = F.affine_grid(theta, list(grid_BDHW.shape), align_corners=False)
    taken = F.grid_sample(grid_BDHW, places, mode, "border", align_corners=False)
    return taken.flatten(2).transpose(1, 2).to(positions_BND.dtype)


def conditions(
    grid: tuple[int, int],
    *,
    occlusion: float,
    patch_drop: tuple[float, ...],
    tiles: tuple[int, ...],
    shift: int,
    scale: float,
    has_table: bool,
) -> list[Condition]:
    """Return what images are measured under, the untouched ones first.

    Args:
        grid: rows and columns of the encoder's patches.
        occlusion: side of the painted box, of the image's.
        patch_drop: shares of patches painted.
        tiles: rows (and columns) of tiles that are shuffled; what does not divide the grid is for
            the caller to refuse.
        shift: patches by which positions are shifted.
        scale: share of the image that positions are stretched from.
        has_table: whether positions are added to patches; else nothing is done to them.
    """
    found = [
        Condition("clean"),
        Condition(
            f"centre {occlusion:g} painted", partial(occlude, side=occlusion, anywhere=False)
        ),
        Condition(f"random {occlusion:g} painted", partial(occlude, side=occlusion, anywhere=True)),
    ]
    for ratio in patch_drop:
        dropping = partial(drop_patches, grid=grid, ratio=ratio)
        found.append(Condition(f"{ratio:g} of patches painted", dropping))
    for count in tiles:
        shuffling = partial(shuffle_tiles, tiles=(count, count))
        found.append(Condition(f"{count} x {count} tiles shuffled", shuffling))
    if has_table:
        shifted = partial(shift_positions, grid=grid, by=shift)
        scaled = partial(scale_positions, grid=grid, by=scale)
        found.append(Condition(f"positions shifted by {shift}", positions=shifted))
        found.append(Condition(f"positions of the middle {scale:g}", positions=scaled))
    return found


def _keys(batch: Batch, seed: int, purpose: str) -> Tensor:
    return draws.sample_keys(seed, 0, batch[INDEX], 0, purpose)
