"""A learned table plus rotary positions (EVA-02, and the ``ape`` models of RoPE-ViT).

The table is added to the tokens, and every block rotates queries and keys. A forgotten place has
angle 0 and, instead of the table's vector, one learned vector or nothing. For other grids and boxes
see ``learned``, ``rotary`` and ``rotary_mixed``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from pospre.errors import UserError
from pospre.nn.places import Places
from pospre.nn.positions import build_positions
from pospre.nn.positions.scheme import Resampling, Scheme, TransformerDims
from pospre.nn.positions.table import Table, TableGrid


class LearnedRotary(Table):
    """A table as in ``learned``, plus a rotation."""

    rotation: Scheme
    """``rotary`` or ``rotary_mixed``, as in recipes."""

    is_added: ClassVar[bool] = False
    timm = "eva"
    is_drawn_larger: ClassVar[bool] = False

    def __init__(
        self,
        dims: TransformerDims,
        *,
        rotation: str | Mapping[str, Mapping[str, Any]] = "rotary",
        table_grid: TableGrid | None = None,
        resampling: Resampling = "bicubic",
    ) -> None:
        super().__init__(dims, table_grid=table_grid, resampling=resampling)
        self.rotation = build_positions(rotation, dims)
        if type(self.rotation).angles is Scheme.angles:
            raise UserError(
                f"encoder.positions.learned_rotary.rotation = {self.rotation.name} rotates "
                "nothing. Use rotary or rotary_mixed."
            )
        self.is_drawn, self.shares_terms = self.rotation.is_drawn, self.rotation.shares_terms

    def reset_parameters(self) -> None:
        """Draw the table and the rotation anew."""
        super().reset_parameters()
        self.rotation.reset_parameters()

    def companion(self, dims: TransformerDims) -> Scheme | None:
        """Return the rotation alone, for a decoder."""
        return self.rotation.companion(dims)

    def check(self, places: Places) -> None:
        """Raise ``UserError`` for places that the rotation cannot take."""
        self.rotation.check(places)

    def angles(self, places: Places, layer: int) -> Tensor | None:
        """Return the angles of the rotation in block ``layer``."""
        return self.rotation.angles(places, layer)
