"""No positions: a bag of patches."""

from typing import ClassVar

from pospre.nn.positions.scheme import Scheme


class NoPositions(Scheme):
    """Tells nothing of any place; tokens differ by what they show alone."""

    takes_boxes: ClassVar[bool] = False
    can_forget: ClassVar[bool] = False
    in_timm: ClassVar[bool] = True
