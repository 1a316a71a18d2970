"""Mixed rotary positions: every head of every block learns its directions of rotation (RoPE-ViT).

A place is (row r, column c) in cells, from (0, 0). In block l the angle of head h and channel pair
i is (Heo et al. 2024, arXiv 2403.13298, Eq. 14, without 2π)

    a_{l,h,i} = c·Fˣ_{l,h,i} + r·Fʸ_{l,h,i},    i = 0 … D/2 − 1

with learned frequencies F. Channel i is rotated together with channel i + D/2. Axial positions
(``rotary``) are a special case: Fʸ = 0 for one half of the pairs and Fˣ = 0 for the other. Prefix
tokens have angle 0, like the first cell.

A forgotten place also has angle 0; a learned vector distinguishes it from the first cell. The
scheme takes any grid and any coordinates. On a larger grid, the angles of the extra cells were
never trained. For views in boxes (crops of a position field), cells are those of the encoder's
grid.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from pospre.nn.places import Places
from pospre.nn.positions.rotary import check_head
from pospre.nn.positions.scheme import Scheme


@dataclass(eq=False, repr=False)
class RotaryMixed(Scheme):
    """Learned frequencies ``freqs`` (2, blocks, heads, D/2): of columns, then of rows.

    As in the published code, they have no weight decay. Angles are computed block by block, because
    (blocks, heads, K, D/2) for every sample would be large.
    """

    base: PositiveFloat = 10.0
    """θ of the initial magnitudes θ^(−4i/D); each head starts in a random direction."""

    shares_terms = False
    in_decoders: ClassVar[bool] = True
    undecayed: ClassVar[tuple[str, ...]] = ("freqs",)
    timm = "eva"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.dims, "rotary_mixed")
        shape = 2, self.dims.depth, self.dims.num_heads, self.dims.head_dim // 2
        self.freqs = nn.Parameter(torch.empty(shape))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a direction φ for each head of each block; half of its pairs are perpendicular.

        With m_i = θ^(−4i/D): Fˣ = [m cos φ, m cos(φ + π/2)], Fʸ = [m sin φ, m sin(φ + π/2)].
        """
        self.freqs.copy_(self.directed(2 * math.pi * torch.rand(self.freqs.shape[1:3])))

    def directed(self, angle_LH: Tensor) -> Tensor:
        """Return the frequencies (2, blocks, heads, D/2) of heads with these directions."""
        count = self.dims.head_dim // 4
        magnitude = self.base ** (-torch.arange(count, dtype=torch.float32) / count)
        across = angle_LH + math.pi / 2
        both = torch.stack([angle_LH, across], -1).repeat_interleave(count, -1)
        return torch.stack([both.cos(), both.sin()]) * magnitude.repeat(2)

    def angles(self, places: Places, layer: int) -> Tensor:
        """Return column·Fˣ + row·Fʸ of block ``layer``: (R, heads, K, D/2), float32 at least."""
        freqs = self.freqs[:, layer]
        freqs = freqs.to(torch.promote_types(freqs.dtype, torch.float32))
        row, column = places.steps(self.dims.grid, freqs.device).unbind(-1)
        across, down = freqs[:, None, :, None]
        return column[:, None, :, None] * across + row[:, None, :, None] * down
