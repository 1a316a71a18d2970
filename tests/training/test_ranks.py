"""What rank 0 does for all reaches all, also when it fails."""

from collections.abc import Callable
from typing import Any

import pytest
from composer.utils import dist

from pospre.errors import UserError
from pospre.training.ranks import from_rank_zero


def fail(error: Exception) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "outcome"),
    [
        (lambda: 7, 7),
        (lambda: None, None),
        (fail(UserError("the disk is full")), (UserError, "^the disk is full$")),
        (fail(KeyError("model")), (RuntimeError, "rank 0 failed: KeyError: 'model'")),
    ],
)
def test_every_rank_has_the_result_or_the_failure_of_rank_zero(
    work: Callable[[], Any], outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks after one another: what the first sends, the second receives."""
    sent: list[Any] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_global_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", sent.extend)
    if isinstance(outcome, tuple):
        with pytest.raises(Exception, match=r"disk|model"):
            from_rank_zero(work)
    else:
        assert from_rank_zero(work) == outcome

    def receive(values: list[Any]) -> None:
        values[:] = sent

    monkeypatch.setattr(dist, "get_global_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    if isinstance(outcome, tuple):
        with pytest.raises(outcome[0], match=outcome[1]):
            from_rank_zero(work)
    else:
        assert from_rank_zero(work) == outcome
