"""Rotary positions: queries and keys are turned by where they are (axial, as DINOv3 has them).

A place is (y, x) in [−1, 1], 0 in the centre of the image. A quarter of a head's channels has y
divided by periods from short to long, the next quarter x; 2π times that is the angle by which
channel i is turned together with channel i + D/2. Of two turned vectors the product depends on the
difference of their places alone. Prefix tokens are not turned, as if they stood in the centre, so
that absolute places can be read off them.

A forgotten place is angle 0, the centre too, and a learned vector that tells it from the centre.
Any grid and any coordinate will do: at another grid the range stays [−1, 1]; in a box (a crop of
the position field) it is that of the field.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from pospre import draws
from pospre.errors import UserError
from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme, Space

Factor = Annotated[float, Field(ge=1)]


class Rotary(Scheme):
    """Axial rotary positions; nothing is learned.

    Args:
        space: of the encoder.
        base: the periods are base^(4i/D), i = 0 … D/4 − 1; None where ``period_range`` is given.
        period_range: the first and the last period, with a constant ratio between neighbours.
        normalize: an axis' length is that of its own side (``separate``), or of the longer or the
            shorter side for both; then the other axis is off the centre.
        shift: in training places are moved by up to so much along each axis.
        jitter: and stretched by up to this factor, or its inverse, along each axis.
        rescale: and then by up to this factor, or its inverse, along both alike.
        bf16_periods: rounded, as DINOv3's published files hold them.
    """

    shares_clues: ClassVar[bool] = True

    def __init__(
        self,
        space: Space,
        *,
        base: PositiveFloat | None = None,
        period_range: tuple[PositiveFloat, PositiveFloat] | None = None,
        normalize: Literal["separate", "max", "min"] = "separate",
        shift: PositiveFloat | None = None,
        jitter: Factor | None = None,
        rescale: Factor | None = None,
        bf16_periods: bool = False,
    ) -> None:
        super().__init__(space)
        check_head(space, "rotary")
        if base is not None and period_range is not None:
            raise UserError(
                f"encoder.positions.rotary has base = {base} and period_range = "
                f"{list(period_range)}; give one of the two."
            )
        self.base = 100.0 if base is None and period_range is None else base
        self.period_range, self.normalize = period_range, normalize
        self.shift, self.jitter, self.rescale = shift, jitter, rescale
        self.bf16_periods = bf16_periods
        self.is_drawn = any(each is not None for each in (shift, jitter, rescale))
        self.periods: Tensor
        self.register_buffer("periods", torch.empty(space.head_dim // 4), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the periods."""
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

    def companion(self, space: Space) -> "Rotary":
        """Return the same for a decoder: it turns by the same places, drawn alike."""
        return Rotary(
            space,
            base=self.base,
            period_range=self.period_range,
            normalize=self.normalize,
            shift=self.shift,
            jitter=self.jitter,
            rescale=self.rescale,
            bf16_periods=self.bf16_periods,
        )

    def check(self, places: Places) -> None:
        """Raise ``UserError`` for boxes where axes have no length of their own, or are drawn."""
        super().check(places)
        odd = self.normalize != "separate" and f"normalize = {self.normalize}"
        odd = odd or (self.is_drawn and "shift, jitter or rescale")
        if places.box is not None and odd:
            raise UserError(
                f"encoder.positions.rotary has {odd}, but views lie in a field already, which is "
                "moved and scaled at every step. Leave it out."
            )

    def angles(self, places: Places, layer: int) -> Tensor:
        """Return 2π·(y, x) / periods: (R, 1, K, D/2), rows first."""
        place = self._drawn(2 * self._shares(places) - 1, places.keys)
        angles = 2 * math.pi * place.unsqueeze(-1) / self.periods
        return angles.flatten(2).unsqueeze(1)

    def _shares(self, places: Places) -> Tensor:
        """Return (row, column) in shares of the lengths that they are divided by."""
        found = places.coordinates(self.periods.device)
        if self.normalize == "separate":
            return found
        length = (max if self.normalize == "max" else min)(places.grid)
        return found * found.new_tensor([side / length for side in places.grid])

    def _drawn(self, place_RK2: Tensor, keys_R: Tensor | None) -> Tensor:
        """Move and stretch the places of each view in training: shift, jitter, rescale."""
        if keys_R is None or not self.is_drawn:
            return place_RK2
        draw = 2 * draws.uniform(keys_R, 5).unsqueeze(1) - 1
        if self.shift is not None:
            place_RK2 = place_RK2 + self.shift * draw[..., :2]
        if self.jitter is not None:
            place_RK2 = place_RK2 * self.jitter ** draw[..., 2:4]
        if self.rescale is not None:
            place_RK2 = place_RK2 * self.rescale ** draw[..., 4:]
        return place_RK2


def check_head(space: Space, name: str) -> None:
    """Raise ``UserError`` unless two axes and two channels for each period divide a head."""
    if space.head_dim % 4:
        raise UserError(
            f"encoder.positions = {name} turns pairs of channels along two axes, but a head is "
            f"{space.head_dim} wide ({space.dim} / {space.num_heads}). Its width must be a "
            "multiple of 4."
        )
