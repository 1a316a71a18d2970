"""Mixed rotary positions: every head of every block learns by which directions it turns (RoPE-ViT).

A place is (row, column) in cells, (0, 0) the first, and the angle of channel pair i in head h of
block l is column·Fˣ + row·Fʸ with learned frequencies F (Heo et al. 2024, arXiv 2403.13298).
Prefix tokens are not turned, as if they stood in the first cell.

A forgotten place is angle 0, the first cell's, and a learned vector that tells it from that. At
another grid cells go on; in a box (a crop of the position field) they are those of the encoder's
grid.
"""

import math
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from pospre.nn.places import Places
from pospre.nn.positions.rotary import check_head
from pospre.nn.positions.scheme import Scheme, Space


class RotaryMixed(Scheme):
    """Learned frequencies (2, blocks, heads, D/2), of columns and of rows.

    Args:
        space: of the encoder.
        base: θ of the first magnitudes θ^(−4i/D); they start in a drawn direction for each head.
    """

    shares_clues: ClassVar[bool] = False

    def __init__(self, space: Space, *, base: PositiveFloat = 10.0) -> None:
        super().__init__(space)
        check_head(space, "rotary_mixed")
        self.base = base
        shape = 2, space.depth, space.num_heads, space.head_dim // 2
        self.freqs = nn.Parameter(torch.empty(shape))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a direction for each head of each block; half the pairs stand across it."""
        count = self.space.head_dim // 4
        magnitude = self.base ** (-torch.arange(count, dtype=torch.float32) / count)
        angle = 2 * math.pi * torch.rand(*self.freqs.shape[1:3], 1)
        both = torch.cat(
            [angle.expand(-1, -1, count), (angle + math.pi / 2).expand(-1, -1, count)], -1
        )
        self.freqs.copy_(torch.stack([both.cos(), both.sin()]) * magnitude.repeat(2))

    def companion(self, space: Space) -> "RotaryMixed":
        """Return one with frequencies of its own for a decoder."""
        return RotaryMixed(space, base=self.base)

    def angles(self, places: Places, layer: int) -> Tensor:
        """Return column·Fˣ + row·Fʸ of block ``layer``: (R, heads, K, D/2)."""
        freqs = self.freqs[:, layer].float()
        row, column = places.steps(self.space.grid, freqs.device).unbind(-1)
        across, down = freqs[:, None, :, None]
        return column[:, None, :, None] * across + row[:, None, :, None] * down
