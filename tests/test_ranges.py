"""The named ranges of options: what lies in each, and what does not."""

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pospre import ranges


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("Width", [4, 384], [0, 2, 30, -4]),
        ("Ratio", [0.0, 0.75], [1.0, 1.5, -0.1, math.nan]),
        ("Share", [0.0, 1.0], [1.1, -0.1, math.nan]),
        ("PositiveShare", [0.1, 1.0], [0.0, 1.1, math.nan]),
        ("ShareRange", [(0.2, 1.0), [0.5, 0.5]], [(0.0, 1.0), (0.2, 1.1), (0.5, 0.2), (0.2,)]),
        ("RatioRange", [(0.0, 0.5), (0.1, 0.1)], [(0.0, 0.0), (0.5, 1.0), (0.5, 0.2)]),
        ("PositiveRange", [(0.75, 1.5)], [(0.0, 1.0), (1.5, 0.75), (math.nan, 1.0)]),
    ],
)
def test_a_range_takes_what_its_name_says(name: str, inside: list[Any], outside: list[Any]) -> None:
    check = TypeAdapter(getattr(ranges, name)).validate_python
    for value in inside:
        assert check(value) == (tuple(value) if isinstance(value, list) else value)
    for value in outside:
        with pytest.raises(ValidationError):
            check(value)
