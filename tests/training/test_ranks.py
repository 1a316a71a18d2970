"""What one rank does for all, and what all do, reaches all, also when it fails."""

from collections.abc import Callable
from typing import Any

import pytest
from composer.utils import dist

from pospre.errors import UserError
from pospre.training.ranks import from_rank_zero, on_every_rank

Work = Callable[[], Any]
FULL, LOST = UserError("the disk is full"), KeyError("model")


def fail(error: Exception) -> Work:
    def work() -> Any:
        raise error

    return work


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return ``outcomes(of_rank)``: what ranks that do ``of_rank(number)`` return or raise.

    They do it one after another; then each hears what all of them have sent.
    """

    def outcome(of_rank: Callable[[int], Any], rank: int) -> Any:
        monkeypatch.setattr(dist, "get_global_rank", lambda: rank)
        try:
            return of_rank(rank)
        except Exception as error:
            return error

    def run(of_rank: Callable[[int], Any]) -> list[Any]:
        sent: list[Any] = []

        def send(told: Any) -> list[Any]:
            sent.append(told)
            return [told]

        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        monkeypatch.setattr(dist, "all_gather_object", send)
        for rank in range(3):
            outcome(of_rank, rank)
        monkeypatch.setattr(dist, "all_gather_object", lambda _: sent)
        return [outcome(of_rank, rank) for rank in range(3)]

    return run


@pytest.mark.parametrize("result", [7, None])
def test_every_rank_has_the_result_of_rank_zero(
    result: Any, outcomes: Callable[..., list[Any]]
) -> None:
    assert (
        outcomes(lambda rank: from_rank_zero(lambda: result if rank == 0 else "x")) == [result] * 3
    )


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (FULL, "UserError: the disk is full"),
        (LOST, "RuntimeError: rank 0 failed: KeyError: 'model'"),
    ],
)
def test_every_rank_has_the_failure_of_rank_zero(
    error: Exception, elsewhere: str, outcomes: Callable[..., list[Any]]
) -> None:
    first, *others = outcomes(lambda rank: from_rank_zero(fail(error)))
    assert first is error
    assert [f"{type(one).__name__}: {one}" for one in others] == [elsewhere] * 2


def test_a_failure_on_any_rank_is_one_on_all(outcomes: Callable[..., list[Any]]) -> None:
    work = [lambda: 1, fail(FULL), fail(LOST)]
    first, second, third = outcomes(lambda rank: on_every_rank(work[rank]))
    assert second is FULL and third is LOST  # its own where it happened
    assert type(first) is UserError and str(first) == str(FULL)
    assert outcomes(lambda rank: on_every_rank(lambda: rank)) == [[0, 1, 2]] * 3
