"""What one rank does or prints for all, and what all do and compare."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from composer.utils import dist

from pospre.errors import UserError

Value = TypeVar("Value")


class _Failure(NamedTuple):
    """What went wrong on a rank, as it travels to the others."""

    rank: int
    is_mistake: bool
    named: str
    words: str


def from_rank_zero(work: Callable[[], Value]) -> Value:
    """Do ``work`` on rank 0 only and return its result on every rank.

    What it raises is raised on every rank, so that none waits for one that has failed.
    """
    result: list[Any] = [None, None]
    error = None
    if dist.get_global_rank() == 0:
        result[0], result[1], error = _try(work)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result)
    _raise(error, [result[1]])
    return result[0]


def on_every_rank(work: Callable[[], Value]) -> list[Value]:
    """Do ``work`` on every rank and return all results, by rank.

    What one raises is raised on every rank: its own where it happened, else the first rank's.
    """
    result, failure, error = _try(work)
    gathered: list[Any] = dist.all_gather_object((result, failure))
    _raise(error, [failure for _, failure in gathered])
    return [result for result, _ in gathered]


def _try(work: Callable[[], Any]) -> tuple[Any, _Failure | None, Exception | None]:
    try:
        return work(), None, None
    except Exception as error:
        named = f"{type(error).__name__}: {error}"
        rank, is_mistake = dist.get_global_rank(), isinstance(error, UserError)
        return None, _Failure(rank, is_mistake, named, str(error)), error


def _raise(error: Exception | None, failures: list[_Failure | None]) -> None:
    if error is not None:
        raise error
    for failure in filter(None, failures):
        if failure.is_mistake:
            raise UserError(failure.words)
        raise RuntimeError(f"rank {failure.rank} failed: {failure.named}")


def print_once(text: str) -> None:
    """Print a line, once however many ranks there are."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)
