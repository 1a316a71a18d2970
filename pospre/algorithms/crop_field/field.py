"""The position field: a picture of position vectors over the original image, cropped like it.

A box is (x0, y0, x1, y1), the view's left, top, right and bottom edge, with the whole field as [0,
1]². If x0 > x1, the view was mirrored together with its positions.
"""

import torch
from torch import Tensor


def beta_2_5(uniform_B6: Tensor) -> Tensor:
    """Return draws of Beta(2, 5), the distribution of the second smallest of six uniform draws."""
    return uniform_B6.sort(dim=-1).values[..., 1]


def enclosing_box(box_BV4: Tensor) -> Tensor:
    """Return the tightest box around a sample's views: (B, 4)."""
    return torch.cat([box_BV4[..., :2].amin(1), box_BV4[..., 2:].amax(1)], dim=-1)


def place_boxes(box_BV4: Tensor, around_B4: Tensor, area_B: Tensor, shift_B2: Tensor) -> Tensor:
    """Scale and move a sample's boxes together, so that the box around them lies in the field.

    All boxes of a sample keep their shapes and their places relative to one another.

    Args:
        box_BV4: the views' boxes in the original image.
        around_B4: A, the box to place.
        area_B: s, the area of A; reduced if A would not fit.
        shift_B2: position of A in the remaining room, each in [0, 1].
    """
    size_B2 = around_B4[:, 2:] - around_B4[:, :2]
    factor = torch.minimum((area_B / size_B2.prod(-1)).sqrt(), 1 / size_B2.amax(-1)).unsqueeze(-1)
    offset = shift_B2 * (1 - factor * size_B2).clamp_min(0) - factor * around_B4[:, :2]
    return box_BV4 * factor.unsqueeze(-1) + offset.repeat(1, 2).unsqueeze(1)


def mirrored_image(box_BV4: Tensor) -> Tensor:
    """Return the boxes of the same views in the mirrored original image."""
    x0, y0, x1, y1 = box_BV4.unbind(-1)
    return torch.stack([1 - x1, y0, 1 - x0, y1], dim=-1)


def reversed_columns(box_BV4: Tensor, flip_BV: Tensor) -> Tensor:
    """Return the boxes with left and right edge exchanged where ``flip_BV`` is true."""
    x0, y0, x1, y1 = box_BV4.unbind(-1)
    return torch.where(flip_BV.unsqueeze(-1), torch.stack([x1, y0, x0, y1], dim=-1), box_BV4)
