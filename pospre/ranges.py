"""Named ranges for options, besides pydantic's ``PositiveInt``, ``NonNegativeFloat`` and so on."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError


def only(is_allowed: Callable[[Any], bool], words: str) -> AfterValidator:
    """Return a validator that refuses other values and describes the allowed ones."""

    def check(value: Any) -> Any:
        if not is_allowed(value):
            raise PydanticCustomError("range", f"Input should be {words}")
        return value

    return AfterValidator(check)


def _bytes(value: Any) -> Any:
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        raise PydanticCustomError(
            "bytes", "Input should be a size such as 200GB or 64MiB"
        ) from None


# Bounds that no model reaches, so that a damaged or hostile file of options takes little memory
Depth = Annotated[int, Field(ge=0, le=256)]
PositiveDepth = Annotated[int, Field(ge=1, le=256)]
Count = Annotated[int, Field(ge=0, le=1 << 16)]
Width = Annotated[int, Field(ge=4, multiple_of=4)]
Ratio = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Size = PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
Pair = Annotated[tuple[float, float], Field(strict=False)]
ShareRange = Annotated[
    Pair, only(lambda pair: 0 < pair[0] <= pair[1] <= 1, "two numbers with 0 < low <= high <= 1")
]
RatioRange = Annotated[
    Pair,
    only(
        lambda pair: 0 <= pair[0] <= pair[1] < 1 and pair[1] > 0,
        "two numbers with 0 <= low <= high < 1, and high above 0",
    ),
]
PositiveRange = Annotated[
    Pair, only(lambda pair: 0 < pair[0] <= pair[1], "two numbers with 0 < low <= high")
]
RisingRange = Annotated[
    Pair, only(lambda pair: pair[0] < pair[1], "auto, or two numbers with low < high")
]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
