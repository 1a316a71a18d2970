"""A learned table and rotary positions together (EVA-02, rope-vit's ``ape`` models).

The table is added to the tokens, and queries and keys are turned in every block. A forgotten place
reaches neither.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from pospre.nn.places import Places
from pospre.nn.positions import build_positions
from pospre.nn.positions.scheme import Space
from pospre.nn.positions.table import Table


class LearnedRotary(Table):
    """A table as in ``learned``, and a rotation.

    Args:
        space: see ``Scheme``.
        rotation: the scheme that turns, ``rotary`` or ``rotary_mixed``, as recipes write it.
    """

    is_added: ClassVar[bool] = False

    def __init__(
        self, space: Space, rotation: str | Mapping[str, Mapping[str, Any]] = "rotary"
    ) -> None:
        super().__init__(space)
        self.rotation = build_positions(rotation, space)

    def reset_parameters(self) -> None:
        """Draw both anew."""
        super().reset_parameters()
        self.rotation.reset_parameters()

    def angles(self, places: Places, layer: int) -> Tensor | None:
        """Return the angles of the rotation in block ``layer``."""
        return self.rotation.angles(places, layer)

    @property
    def shares_clues(self) -> bool:
        """Whether the rotation is alike in all blocks."""
        return self.rotation.shares_clues
