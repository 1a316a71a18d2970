"""Types of arguments, checked where a user of the library calls it."""

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call

from pospre.errors import UserError, suggestion

_LONGEST = 80  # of what is quoted: a whole model fills screens

P = ParamSpec("P")
Result = TypeVar("Result")


def typed(function: Callable[P, Result]) -> Callable[P, Result]:
    """Make a ``UserError`` of an argument of another type than its annotation says."""

    @cache  # made when it is first called: annotations may name what comes below
    def checked() -> Callable[P, Result]:
        return validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return checked()(*args, **kwargs)
        except ValidationError as error:
            first = error.errors()[0]
            place = first["loc"][0]
            key = place if isinstance(place, str) else [*signature(function).parameters][place]
            given = repr(first["input"])
            if len(given) > _LONGEST:
                given = f"of type {type(first['input']).__name__}"
            said = f"{key} is {given}: {first['msg']}."
            if first["type"] == "unexpected_keyword_argument":
                said += suggestion(key, signature(function).parameters)
            raise UserError(f"{function.__name__}: {said}") from None

    return call
