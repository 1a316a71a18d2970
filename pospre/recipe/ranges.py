"""Names of ranges: the options of sections and algorithms are declared with them.

Beside them stand pydantic's ``PositiveInt``, ``NonNegativeFloat`` and so on.
"""

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

Width = Annotated[int, Field(ge=4, multiple_of=4)]
Ratio = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Pair = Annotated[tuple[float, float], Field(strict=False)]


def _share_range(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1] <= 1:
        raise PydanticCustomError("pair", "Input should be two numbers with 0 < low <= high <= 1")
    return pair


def _ratio_range(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= pair[0] <= pair[1] < 1 or pair[1] == 0:
        raise PydanticCustomError(
            "pair", "Input should be two numbers with 0 <= low <= high < 1, and high above 0"
        )
    return pair


def _positive_range(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise PydanticCustomError("pair", "Input should be two numbers with 0 < low <= high")
    return pair


ShareRange = Annotated[Pair, AfterValidator(_share_range)]
RatioRange = Annotated[Pair, AfterValidator(_ratio_range)]
PositiveRange = Annotated[Pair, AfterValidator(_positive_range)]
