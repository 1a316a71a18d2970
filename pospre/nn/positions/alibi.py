"""ALiBi in two dimensions: an attention bias by distance, with one slope per head.

ALiBi (Press et al. 2022, arXiv 2108.12409) subtracts from the logits a term that grows with the
distance of query and key. In two dimensions (CROMA, Fuller et al. 2023, arXiv 2311.00566) the bias
of head h is

    −m_h · ‖place of the query − place of the key‖

with the Euclidean distance in cells. The bias is symmetric. The slopes m_h are fixed, or each block
learns its own. Prefix tokens are at distance 0 from all tokens. Absolute positions can be inferred
from the borders, up to the square's symmetries. A torus has no borders and reveals none.

A forgotten place is at distance 0 from all tokens. The scheme takes any grid and any coordinates.
On a larger grid, distances in cells grow; on a torus they keep their range. For views in boxes
(crops of a position field), cells are those of the encoder's grid.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme, centred

Slopes = Literal["fixed", "constant", "learned"]


@dataclass(eq=False, repr=False)
class Alibi(Scheme):
    """Attention biases by distance."""

    slopes: Slopes = "fixed"
    """``fixed``, ALiBi's 2^(−8i/heads), i = 1 … heads; ``constant``, 1 in every head; ``learned``
    per head and block, from U(0, 1), without weight decay (DINO-SAW).
    """

    in_decoders: ClassVar[bool] = True
    can_fit: ClassVar[bool] = True
    fit_needs: ClassVar[Mapping[str, Any]] = MappingProxyType({"slopes": "learned"})
    undecayed: ClassVar[tuple[str, ...]] = ("slope",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares_terms = self.slopes != "learned"
        self.slope: Tensor
        if self.slopes == "learned":
            self.slope = nn.Parameter(torch.empty(self.dims.depth, self.dims.num_heads))
        else:
            self.register_buffer("slope", torch.empty(1, self.dims.num_heads), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute or draw the slopes."""
        if self.slopes == "learned":
            nn.init.uniform_(self.slope)
        elif self.slopes == "constant":
            nn.init.ones_(self.slope)
        else:
            self.slope.copy_(torch.tensor([head_slopes(self.dims.num_heads)]))

    def distances(self, places: Places, layer: int) -> Tensor:
        """Return −slope · distance: float32 (R, heads, T, T); R = 1 if all rows are alike."""
        distance = self.apart(places).square().sum(-1).sqrt().unsqueeze(1)
        slope_H = self.slope[0 if self.shares_terms else layer]
        bias = -slope_H[:, None, None] * distance
        return F.pad(bias, (self.dims.num_prefix, 0, self.dims.num_prefix, 0))

    def apart(self, places: Places) -> Tensor:
        """Return the distances (R, queries, keys, 2) of rows and of columns."""
        steps = places.steps(self.dims.grid, self.slope.device)
        return (steps[:, :, None] - steps[:, None]).abs()

    @torch.no_grad()
    def fit(self, logits_HNN: Tensor, layer: int, grid: tuple[int, int]) -> None:
        """Set the slopes by least squares, at least 0."""
        distance = centred(self.apart(Places(grid)).square().sum(-1).sqrt())
        slope_H = -(logits_HNN * distance).sum((1, 2)) / distance.square().sum().clamp_min(1e-9)
        self.slope[layer] = slope_H.clamp_min(0)


@dataclass(eq=False, repr=False)
class Torus(Alibi):
    """Attention biases by distance on a torus: opposite edges are joined (DINO-SAW).

    Distances are divided by the longest one between cells.
    """

    is_cyclic: ClassVar[bool] = True
    slopes: Slopes = "constant"
    """As in ``alibi``; ``constant`` is the published choice."""

    def apart(self, places: Places) -> Tensor:
        """Return the distances (R, queries, keys, 2), the shorter way round."""
        sides = self.dims.grid if places.box is not None else places.grid
        down, across = super().apart(places).unbind(-1)
        parts = torch.minimum(down, sides[0] - down), torch.minimum(across, sides[1] - across)
        longest = math.hypot(*(side // 2 for side in sides)) or 1.0
        return torch.stack(parts, dim=-1) / longest


def head_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes: 2^(−8i/heads) for powers of two, interleaved for other counts."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return slopes + between
