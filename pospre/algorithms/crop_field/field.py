"""The position field: a picture of position vectors over the original image, cropped like it.

A box is (x0, y0, x1, y1) with the whole field as [0, 1]²: the view's left, top, right and bottom
edge. x0 > x1 runs from right to left: the view was mirrored together with its positions.
"""

import torch
from torch import Tensor

from pospre.nn.interpolation import Interpolation, interpolation_weights
from pospre.nn.positions import sincos_at


def patch_centres(low_R: Tensor, high_R: Tensor, count: int) -> Tensor:
    """Return (R, count) centres of equal cells between two edges."""
    share = (torch.arange(count, dtype=low_R.dtype, device=low_R.device) + 0.5) / count
    return low_R[:, None] + (high_R - low_R)[:, None] * share


def sample_field(
    field_HWD: Tensor, box_R4: Tensor, grid: tuple[int, int], kind: Interpolation = "bicubic"
) -> Tensor:
    """Return the field's vectors at the patch centres of every box: (R, rows·cols, D).

    Boxes are upright, so that rows and columns are interpolated one after the other, by two matrix
    products: p = R_y P R_xᵀ. Unlike ``F.grid_sample`` its gradient has the same bits every time on
    a GPU.

    Args:
        field_HWD: P.
        box_R4: of the field's precision.
        grid: (rows, columns) of patches in a box.
        kind: of interpolation.
    """
    height, width, dim = field_HWD.shape
    rows, cols = grid
    down = interpolation_weights(patch_centres(box_R4[:, 1], box_R4[:, 3], rows), height, kind)
    across = interpolation_weights(patch_centres(box_R4[:, 0], box_R4[:, 2], cols), width, kind)
    lines = (down.flatten(0, 1) @ field_HWD.flatten(1)).view(-1, rows, width, dim)
    return (across.unsqueeze(1) @ lines).flatten(1, 2)


def sincos_in_boxes(
    dim: int, box_R4: Tensor, grid: tuple[int, int], cells: tuple[int, int]
) -> Tensor:
    """Return the sin-cos vectors at the patch centres of every box: (R, rows·cols, dim).

    Args:
        dim: width of a vector.
        box_R4: float32.
        grid: (rows, columns) of patches in a box.
        cells: (rows, columns) of the table that the whole field is.
    """
    rows, cols = grid
    column = patch_centres(box_R4[:, 0], box_R4[:, 2], cols) * cells[1] - 0.5
    row = patch_centres(box_R4[:, 1], box_R4[:, 3], rows) * cells[0] - 0.5
    places = torch.stack(
        [column[:, None].expand(-1, rows, -1), row[:, :, None].expand(-1, -1, cols)], dim=-1
    )
    return sincos_at(dim, places.flatten(1, 2))


def beta_2_5(uniform_B6: Tensor) -> Tensor:
    """Return draws of Beta(2, 5): the second smallest of six uniform draws has that law."""
    return uniform_B6.sort(dim=-1).values[..., 1]


def enclosing_box(box_BV4: Tensor) -> Tensor:
    """Return the tightest box around a sample's views: (B, 4)."""
    return torch.cat([box_BV4[..., :2].amin(1), box_BV4[..., 2:].amax(1)], dim=-1)


def place_boxes(box_BV4: Tensor, around_B4: Tensor, area_B: Tensor, shift_B2: Tensor) -> Tensor:
    """Scale and move a sample's boxes together, so that the one around them lies in the field.

    All boxes of a sample keep their shapes and their places relative to one another.

    Args:
        box_BV4: the views' boxes in the original image.
        around_B4: A, the box to place.
        area_B: s, the area that A shall have; less where it would not fit.
        shift_B2: where A goes in the room that is left, each in [0, 1].
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
