"""No positions: a bag of patches."""

from typing import ClassVar

import torch
from torch import Tensor

from pospre.nn.positions.scheme import Scheme


class NoPositions(Scheme):
    """Tells nothing of any place; tokens differ by what they show alone."""

    takes_boxes: ClassVar[bool] = False
    can_forget: ClassVar[bool] = False
    timm = "vit"

    def exported(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return a table of zeros: timm leaves the class token out where there is none."""
        count = self.space.num_prefix + grid[0] * grid[1]
        return {"pos_embed": torch.zeros(1, count, self.space.dim)}
