"""Kinds of values in a recipe: durations, sizes, paths, and what must hold of each."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from pospre.recipe.ranges import Pair
from pospre.schedules import DURATION


def _duration(value: Any) -> Any:
    if not isinstance(value, str) or not DURATION.fullmatch(value):
        raise PydanticCustomError(
            "duration",
            "Input should be a duration with its unit: {number}ep (epochs), {number}ba (steps) or "
            "{number}sp (samples)",
            {"number": value if type(value) is int else 10},
        )
    return value


def _positive_duration(value: Any) -> Any:
    if _duration(value).startswith("0"):
        raise PydanticCustomError("duration", "Input should be longer than nothing")
    return value


def _local_or_s3(address: str) -> str:
    scheme, separator, _ = address.partition("://")
    if separator and scheme != "s3":
        raise PydanticCustomError("address", "Input should be a local folder or s3://bucket/folder")
    return _plain_path(address)


def _plain_path(path: str) -> str:
    # Composer would fill {rank}, {epoch} and so on in, and nothing would be found there again
    if "{" in path or "}" in path:
        raise PydanticCustomError("address", "Input should be a path without '{' and '}'")
    return path


def _beta(pair: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in pair):
        raise PydanticCustomError("pair", "Input should be two numbers from 0 to below 1")
    return pair


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] < pair[1]:
        raise PydanticCustomError("pair", "Input should be auto, or two numbers with low < high")
    return pair


def _positive(numbers: tuple[float, ...]) -> tuple[float, ...]:
    if not all(number > 0 for number in numbers):
        raise PydanticCustomError("numbers", "Input should be numbers above 0")
    return numbers


def _all_or_some(count: int) -> int:
    if count < 1 and count != -1:
        raise PydanticCustomError("count", "Input should be 1 or more, or -1 to keep all")
    return count


def _bytes(value: Any) -> Any:
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        raise PydanticCustomError(
            "bytes", "Input should be a size such as 200GB or 64MiB"
        ) from None


Duration = Annotated[str, BeforeValidator(_duration)]
PositiveDuration = Annotated[str, BeforeValidator(_positive_duration)]
PositionKind = Literal["sincos", "learned", "learned_sincos", "none", "relative", "shared_relative"]
Init = Literal["xavier", "trunc_normal", "deit", "dinov2", "beit"]
Side = Annotated[int, Field(gt=0)]
Size = Side | Annotated[tuple[Side, Side], Field(strict=False)]
Rate = float | Annotated[tuple[float, ...], Field(strict=False)]
Betas = Annotated[Pair, AfterValidator(_beta)]
RisingRange = Annotated[Pair, AfterValidator(_rising)]
PlainPath = Annotated[str, AfterValidator(_plain_path)]
LocalOrS3 = Annotated[str, AfterValidator(_local_or_s3)]
AllOrSome = Annotated[int, AfterValidator(_all_or_some)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
Numbers = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
PositiveNumbers = Annotated[Numbers, AfterValidator(_positive)]
Arguments = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
