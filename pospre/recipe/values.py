"""Types of recipe values: durations, sizes and paths, and their constraints."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pospre.ranges import Pair, only
from pospre.recipe.yaml_text import VARIABLE
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


def _share(value: Any) -> Any:
    if isinstance(value, str) and DURATION.fullmatch(value) and not value.startswith("0"):
        return value
    if isinstance(value, float) and 0 < value < 1:
        return value
    words = "Input should be a share of the run such as 0.15, or a duration: 10ep, 500ba or 9000sp"
    raise PydanticCustomError("range", words)


Duration = Annotated[str, BeforeValidator(_duration)]
ShareOrDuration = Annotated[float | str, BeforeValidator(_share)]
_above_zero = only(lambda duration: not duration.startswith("0"), "longer than 0")
PositiveDuration = Annotated[Duration, _above_zero]
DurationOrAuto = Annotated[
    str,
    BeforeValidator(lambda value: value if value == "auto" else _duration(value)),
    _above_zero,
]
Betas = Annotated[
    Pair, only(lambda pair: min(pair) >= 0 and max(pair) < 1, "two numbers from 0 to below 1")
]
# Composer would fill in {rank}, {epoch} and so on, and the path could not be found again; recorded
# recipes may contain environment variables
PlainPath = Annotated[
    str,
    only(lambda path: not {"{", "}"} & {*VARIABLE.sub("", path)}, "a path without '{' and '}'"),
]
LocalOrS3 = Annotated[
    PlainPath,
    only(
        lambda address: address.startswith("s3://") or not re.match("s3:/|.*://", address),
        "a local folder or s3://bucket/folder",
    ),
]
AllOrSome = Annotated[
    int, only(lambda count: count >= 1 or count == -1, "1 or more, or -1 to keep all")
]
Numbers = Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
PositiveNumbers = Annotated[Numbers, only(lambda numbers: min(numbers) > 0, "numbers above 0")]
Arguments = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
