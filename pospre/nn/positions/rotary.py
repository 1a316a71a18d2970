"""Axial rotary positions: queries and keys are rotated by their row and column.

Su et al. 2021 (arXiv 2104.09864) rotate pairs of channels. In two dimensions one half of the pairs
rotates by the row and the other by the column. A place is (y, x). With periods p_0 … p_{D/4−1},
from short to long, a head of D channels has the angles

    a = t·[y/p_0, …, y/p_{D/4−1}, x/p_0, …, x/p_{D/4−1}]    (D/2 of them)

and channel i is rotated together with channel i + D/2. The product of two rotated vectors depends
only on the difference of their places. Encoders differ in y, x and t:

- ``centred`` (DINOv3, arXiv 2508.10104): y and x run from −1 to 1 over the image, t = 2π.
- ``cells`` (RoPE-ViT, arXiv 2403.13298): whole cells from the first, t = 1, columns first.
- ``reference`` (EVA-02, arXiv 2303.11331): cells of a grid of 16×16 over the image, t = 1.

With more ``directions`` (Spiral RoPE, Liu et al. 2026, arXiv 2602.03227), pairs i and i + D/4 turn
by y·cos φ_i + x·sin φ_i and x·cos φ_i − y·sin φ_i, with K/2 values of φ_i between 0 and π/2. The
published code turns a picture of the angles instead, which clamps 20 to 29 % of the patches to the
border; ours clamps none. ``golden`` has a direction for each pair of each head.

Prefix tokens have angle 0. This is the image's centre for centred places and the first cell
otherwise, so absolute positions can be inferred from them.

A forgotten place also has angle 0; a learned vector distinguishes it from the true place there. The
scheme takes any grid and any coordinates. On other grids, centred and reference places keep their
range, while cells count on. For views in boxes (crops of a position field), coordinates are the
field's.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from pospre import draws
from pospre.errors import UserError
from pospre.nn.places import Places, scaled
from pospre.nn.positions.scheme import Scheme, TransformerDims

Factor = Annotated[float, Field(ge=1)]
_PLASTIC = 1.32471796  # the plastic number: n/p and n/p² fill the unit square evenly
_REFERENCE = 16  # EVA-02 was pre-trained with 16×16 patches


@dataclass(eq=False, repr=False)
class Rotary(Scheme):
    """Axial rotary positions; nothing is learned.

    The options define the periods; weights do not contain them. ``reset_parameters`` recomputes
    them, also after ``to_empty``.
    """

    base: PositiveFloat | None = None
    """The periods are base^(4i/D), i = 0 … D/4 − 1. Default: 100; EVA-02 has 10000."""
    period_range: tuple[PositiveFloat, PositiveFloat] | None = None
    """First and last period instead of ``base``, with a constant ratio between neighbours."""
    coordinates: Literal["centred", "cells", "reference"] = "centred"
    """``centred`` (DINOv3), ``cells`` (RoPE-ViT), or ``reference``: cells of a 16×16 grid (EVA-02).
    """
    columns_first: bool = False
    """x comes before y in the angles."""
    directions: Annotated[int, Field(ge=2, multiple_of=2)] | Literal["golden"] = 2
    """Along which pairs of channels turn: 2 are the axes; more, up to a quarter of a head's width,
    are spread evenly; ``golden`` gives every pair of every head its own.
    """
    normalize: Literal["separate", "max", "min"] = "separate"
    """Scale centred places by each axis's own side, or by the longer or shorter one, which leaves
    the other axis off-centre.
    """
    shift: PositiveFloat | None = None
    """In training, shift the places of a view by up to this much along each axis."""
    jitter: Factor | None = None
    """Then stretch each axis by up to this factor or its inverse."""
    rescale: Factor | None = None
    """Then scale both axes by up to this factor or its inverse."""
    bf16_periods: bool = False
    """Round periods to bfloat16, as in DINOv3's published files."""

    timm = "eva"
    in_decoders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.dims, "rotary")
        self._check_options()
        if self.base is None and self.period_range is None:
            self.base = 100.0
        self.is_drawn = any(each is not None for each in (self.shift, self.jitter, self.rescale))
        count = self.dims.head_dim // 4
        own = self.directions == "golden"
        self.periods: Tensor
        self.headings: Tensor
        self.register_buffer("periods", torch.empty(2 * count if own else count), persistent=False)
        shape = (2, self.dims.num_heads if own else 1, 2 * count)
        self.register_buffer("headings", torch.empty(shape), persistent=False)

    def _check_options(self) -> None:
        """Raise ``UserError`` for options that exclude each other."""
        if self.base is not None and self.period_range is not None:
            raise UserError(
                f"encoder.positions.rotary has base = {self.base} and period_range = "
                f"{list(self.period_range)}; give one of the two."
            )
        if self.coordinates != "centred" and self.normalize != "separate":
            raise UserError(
                f"encoder.positions.rotary.normalize = {self.normalize} is for coordinates = "
                f"centred, not {self.coordinates}. Leave it out."
            )
        if self.directions == "golden" and self.columns_first:
            raise UserError(
                "encoder.positions.rotary.columns_first has no meaning with directions = golden, "
                "where no half of the pairs is an axis's. Leave it out."
            )
        count = self.dims.head_dim // 4
        if isinstance(self.directions, int) and self.directions > count:
            raise UserError(
                f"encoder.positions.rotary.directions = {self.directions}, but a head of "
                f"{self.dims.head_dim} channels has {count} periods: at most {count // 2 * 2}."
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the periods and the directions."""
        self.headings.copy_(self._directed())
        count = len(self.periods)
        share = torch.arange(count, dtype=torch.float64) / count
        if self.base is not None:
            periods = self.base**share
        else:
            assert self.period_range is not None
            low, high = self.period_range
            periods = low * (high / low) ** (share * count / max(count - 1, 1))
        if self.bf16_periods:
            periods = periods.bfloat16()
        self.periods.copy_(periods)

    def check(self, places: Places) -> None:
        """Raise ``UserError`` for boxes if axes share a length or places are augmented."""
        super().check(places)
        odd = [f"normalize = {self.normalize}"] * (self.normalize != "separate")
        odd += ["shift, jitter or rescale"] * self.is_drawn
        if places.box is not None and odd:
            raise UserError(
                f"encoder.positions.rotary has {' and '.join(odd)}, but views lie in a position "
                "field, which already shifts and scales them at every step. Leave it out."
            )

    def angles(self, places: Places, layer: int) -> Tensor:
        """Return t·(y, x)·direction / period: (R, 1 or heads, K, D/2), float32 at least."""
        place_RK2 = self._drawn(self._place(places), places.keys)
        turn = 2 * math.pi if self.coordinates == "centred" else 1.0
        y, x = (turn * place_RK2)[:, None, :, None].unbind(-1)
        down, across = self.headings[:, :, None]
        return (y * down + x * across) / self._pair_periods()

    def frequencies(self) -> Tensor:
        """Return those of columns, then of rows, as ``rotary_mixed``'s: (2, blocks, heads, D/2)."""
        shape = 2, self.dims.depth, self.dims.num_heads, -1
        return (self.headings.flip(0) / self._pair_periods()).unsqueeze(1).expand(shape).clone()

    def _pair_periods(self) -> Tensor:
        return self.periods.repeat(self.headings.shape[-1] // len(self.periods))

    def _directed(self) -> Tensor:
        """Return what a step down and a step across count in each pair: (2, 1 or heads, D/2)."""
        count = self.dims.head_dim // 4
        if self.directions == "golden":
            number = torch.arange(1, 2 * count * self.dims.num_heads + 1, dtype=torch.float64)
            spread = torch.stack([number / _PLASTIC, number / _PLASTIC**2]).frac()
            normal = torch.special.erfinv(2 * spread - 1)  # a direction as even as the spread
            return (normal / normal.norm(dim=0)).flip(0).view(2, self.dims.num_heads, -1)
        angle = torch.arange(count, dtype=torch.float64).div(2, rounding_mode="floor")
        angle = angle % (int(self.directions) // 2) * (math.pi / int(self.directions))
        first = torch.stack([angle.cos(), angle.sin()])
        second = torch.stack([-angle.sin(), angle.cos()])
        halves = (second, first) if self.columns_first else (first, second)
        return torch.cat(halves, dim=-1).unsqueeze(1)

    def _place(self, places: Places) -> Tensor:
        """Return (y, x) of every token: float32 (R, K, 2)."""
        device, own = self.periods.device, places.grid
        if self.coordinates == "centred":
            place = places.coordinates(device)
            if self.normalize != "separate":
                length = (max if self.normalize == "max" else min)(own)
                place = scaled(place, [side / length for side in own])
            return 2 * place - 1
        place = places.steps(self.dims.grid, device)
        if self.coordinates == "cells":
            return place
        frame = own if places.box is None else self.dims.grid
        return scaled(place, [_REFERENCE / side for side in frame])

    def _drawn(self, place_RK2: Tensor, keys_R: Tensor | None) -> Tensor:
        """Shift and stretch the places of each view in training: shift, jitter, rescale.

        The distributions are DINOv3's. Its code draws once per block for all images of a rank. Here
        each view has its own draw, shared by all blocks and the decoder.
        """
        if keys_R is None or not (self.is_drawn and self.training):
            return place_RK2
        draw = 2 * draws.uniform(keys_R, 5).unsqueeze(1) - 1
        if self.shift is not None:
            place_RK2 = place_RK2 + self.shift * draw[..., :2]
        if self.jitter is not None:
            place_RK2 = place_RK2 * self.jitter ** draw[..., 2:4]
        if self.rescale is not None:
            place_RK2 = place_RK2 * self.rescale ** draw[..., 4:]
        return place_RK2


def check_head(dims: TransformerDims, name: str) -> None:
    """Raise ``UserError`` unless 4 divides the head width (two axes, two channels per period)."""
    if dims.head_dim % 4:
        raise UserError(
            f"encoder.positions = {name} rotates pairs of channels along two axes, but a head is "
            f"{dims.head_dim} wide ({dims.dim} / {dims.num_heads}). It must be a multiple of 4: "
            "change the number of heads of the encoder or the decoder."
        )
