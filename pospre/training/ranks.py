"""What one rank does or says for all."""

from collections.abc import Callable
from typing import TypeVar

from composer.utils import dist

Value = TypeVar("Value")


def from_rank_zero(work: Callable[[], Value]) -> Value:
    """Do ``work`` on rank 0 only and return its result on every rank."""
    result = [work()] if dist.get_global_rank() == 0 else [None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]


def say(text: str) -> None:
    """Print a line, once however many ranks there are."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)
