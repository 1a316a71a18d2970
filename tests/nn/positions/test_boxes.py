"""Tables read in boxes of the frame, against torch's own sampling."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.nn.positions.scheme import TransformerDims
from pospre.nn.positions.table import Table

WHOLE = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64)


def random_field(height: int = 9, width: int = 7, dim: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(height, width, dim, dtype=torch.float64, generator=generator)


def random_boxes(count: int = 6, views: int = 4) -> Tensor:
    draw = torch.rand(
        count, views, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    low, size = draw[..., :2] * 0.6, 0.05 + draw[..., 2:] * 0.3
    return torch.cat([low, low + size], dim=-1)


def dims(dim: int, grid: tuple[int, int], *, class_token: bool = False) -> TransformerDims:
    return TransformerDims(dim, 1, 1, grid, class_token)


def in_boxes(field_HWD: Tensor, box_R4: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return what a table that holds the field gives in boxes; a class token's row stays out."""
    height, width, dim = field_HWD.shape
    table = Table(dims(dim, (height, width), class_token=True))
    del table.pos_embed  # a parameter takes no tensor with a history
    own = torch.full_like(field_HWD[:1, 0], torch.nan)
    table.pos_embed = torch.cat([own, field_HWD.flatten(0, 1)])[None]
    return table.in_boxes(box_R4, grid)


@pytest.mark.parametrize("side", [4, 14, 20])
def test_the_whole_field_on_another_grid_is_torchs_resize(side: int) -> None:
    field = random_field(10, 10)
    resized = F.interpolate(
        field.permute(2, 0, 1).unsqueeze(0), size=(side, side), mode="bicubic", align_corners=False
    )
    sampled = in_boxes(field, WHOLE, (side, side))
    torch.testing.assert_close(sampled[0], resized[0].flatten(1).T, rtol=0, atol=1e-12)


def test_sampling_gives_the_field_an_exact_gradient() -> None:
    field = random_field(5, 4, 2).requires_grad_()
    boxes = random_boxes(2, 1).flatten(0, 1)
    assert torch.autograd.gradcheck(lambda p: in_boxes(p, boxes, (2, 3)), (field,))
