"""Corruptions: images with parts removed or moved, and encoders given other places.

Every draw is a function of the seed and the image's index in its data set.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre import draws
from pospre.batch import INDEX, Batch
from pospre.evaluation.classification.settings import Robustness
from pospre.nn.masking import num_visible, random_masking, slot_mask
from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme

Change = Callable[[Tensor, Batch, int], Tensor]
"""Maps normalised images (B, C, H, W), their batch and a seed to corrupted images."""
Move = Callable[[Places, torch.device], Places]
"""Maps the places of whole images to others."""


class Condition(NamedTuple):
    """A corruption of images and of their patches' places."""

    name: str
    change: Change | None = None
    places: Move | None = None


def occlude(images_BCHW: Tensor, batch: Batch, seed: int, *, side: float, anywhere: bool) -> Tensor:
    """Fill a box, ``side`` of the height and of the width, with the mean colour (0).

    The box is in the middle, or anywhere in the image.
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
    """Fill a share of the encoder's patches with the mean colour."""
    patches = grid[0] * grid[1]
    keys = _keys(batch, seed, "robustness/drop")
    masking = random_masking(keys, patches, num_visible(patches, ratio, key="patch_drop"))
    hidden_BN = slot_mask(masking.hidden, patches).view(-1, 1, *grid)
    size = images_BCHW.shape[-2:]
    hidden_B1HW = F.interpolate(hidden_BN.float(), size=size, mode="nearest").bool()
    return images_BCHW.masked_fill(hidden_B1HW, 0)


def shuffle_tiles(
    images_BCHW: Tensor, batch: Batch, seed: int, *, tiles: tuple[int, int]
) -> Tensor:
    """Shuffle the tiles of a grid."""
    order_BN = draws.permutation(_keys(batch, seed, "robustness/shuffle"), tiles[0] * tiles[1])
    return reorder_tiles(images_BCHW, order_BN, tiles)


def reorder_tiles(images_BCHW: Tensor, order_BN: Tensor, tiles: tuple[int, int]) -> Tensor:
    """Return images whose i-th of (rows, columns) tiles was at ``order_BN[:, i]``."""
    cut = images_BCHW.unflatten(3, (tiles[1], -1)).unflatten(2, (tiles[0], -1))
    cut = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # B, tiles, C, h, w
    rows = torch.arange(len(cut), device=cut.device).unsqueeze(1)
    mixed = cut[rows, order_BN].unflatten(1, tiles)
    return mixed.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def shifted_places(places: Places, device: torch.device, *, by: int) -> Places:
    """Move every patch's place ``by`` rows down and columns to the right, wrapping at the edges."""
    rows, cols = places.grid
    cells = torch.arange(rows * cols, device=device).view(rows, cols).roll((-by, -by), (0, 1))
    return places.move(cells.view(1, -1))


def middle_places(places: Places, device: torch.device, *, by: float) -> Places:
    """Give the patches places within the middle of the image, ``by`` of each side."""
    low, high = (1 - by) / 2, (1 + by) / 2
    return places.within(torch.tensor([[low, low, high, high]], device=device))


def no_places(places: Places, device: torch.device) -> Places:
    """Forget all places."""
    count = places.grid[0] * places.grid[1]
    return places.forget(torch.ones(1, count, dtype=torch.bool, device=device))


def conditions(settings: Robustness, grid: tuple[int, int], positions: Scheme) -> list[Condition]:
    """Return the conditions to measure and that ``positions`` support, the clean images first."""
    occlusion, shift, scale = settings.occlusion, settings.shift, settings.scale
    chosen = [
        Condition("clean"),
        Condition(
            f"centre {occlusion:g} painted", partial(occlude, side=occlusion, anywhere=False)
        ),
        Condition(f"random {occlusion:g} painted", partial(occlude, side=occlusion, anywhere=True)),
    ]
    for ratio in settings.patch_drop:
        dropping = partial(drop_patches, grid=grid, ratio=ratio)
        chosen.append(Condition(f"{ratio:g} of patches painted", dropping))
    for count in settings.tiles:
        shuffling = partial(shuffle_tiles, tiles=(count, count))
        chosen.append(Condition(f"{count} x {count} tiles shuffled", shuffling))
    if positions.can_forget:
        shifted = partial(shifted_places, by=shift)
        chosen.append(Condition(f"positions shifted by {shift}", places=shifted))
    if positions.takes_boxes:
        middle = partial(middle_places, by=scale)
        chosen.append(Condition(f"positions of the middle {scale:g}", places=middle))
    return chosen


def _keys(batch: Batch, seed: int, purpose: str) -> Tensor:
    return draws.sample_keys(seed, 0, batch[INDEX], 0, purpose)
