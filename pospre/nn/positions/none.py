"""No positions: a bag of patches."""

from typing import ClassVar

import torch
from torch import Tensor

from pospre.nn.positions.scheme import Scheme


class NoPositions(Scheme):
    """No position information; tokens differ only by their content."""

    takes_boxes: ClassVar[bool] = False
    can_forget: ClassVar[bool] = False
    is_cyclic: ClassVar[bool] = True
    timm = "vit"

    def exported(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return a table of zeros; without a table, timm would drop the class token."""
        count = self.dims.num_prefix + grid[0] * grid[1]
        return {"pos_embed": torch.zeros(1, count, self.dims.dim)}
