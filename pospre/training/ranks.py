"""What one rank does or prints for all."""

from collections.abc import Callable
from typing import Any, TypeVar

from composer.utils import dist

from pospre.errors import UserError

Value = TypeVar("Value")


def from_rank_zero(work: Callable[[], Value]) -> Value:
    """Do ``work`` on rank 0 only and return its result on every rank.

    What it raises is raised on every rank, so that none waits for one that has failed.
    """
    result: list[Any] = [None, None]  # and what went wrong: the user's mistake or not, and words
    failure = None
    if dist.get_global_rank() == 0:
        try:
            result[0] = work()
        except Exception as error:
            failure = error
            result[1] = isinstance(error, UserError), f"{type(error).__name__}: {error}", str(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result)
    if failure is not None:
        raise failure
    if result[1] is not None:
        is_mistake, named, words = result[1]
        raise UserError(words) if is_mistake else RuntimeError(f"rank 0 failed: {named}")
    return result[0]


def print_once(text: str) -> None:
    """Print a line, once however many ranks there are."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)
