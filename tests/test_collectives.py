"""What rank 0 does for all reaches all, also when it fails."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.utils import dist

from pospre.collectives import Greatest, from_rank_zero, on_every_rank
from pospre.errors import UserError
from tests.processes import finished, launcher
from tests.training.tiny_runs import environment


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


def test_a_failure_on_any_rank_is_one_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks after one another, then what all of them have sent."""
    work = [lambda: 1, fail(UserError("the disk is full")), fail(KeyError("model"))]
    sent: list[Any] = []

    def send(told: Any) -> list[Any]:
        sent.append(told)
        return [told]

    monkeypatch.setattr(dist, "all_gather_object", send)
    for rank in range(3):
        monkeypatch.setattr(dist, "get_global_rank", lambda rank=rank: rank)
        with contextlib.suppress(UserError, KeyError):
            on_every_rank(work[rank])
    monkeypatch.setattr(dist, "all_gather_object", lambda _: sent)
    for rank, error in enumerate((UserError, UserError, KeyError)):
        monkeypatch.setattr(dist, "get_global_rank", lambda rank=rank: rank)
        with pytest.raises(error, match=r"^the disk is full$" if rank < 2 else "model"):
            on_every_rank(work[rank])
    sent = [(result, None) for result in "abc"]
    assert on_every_rank(lambda: "a") == ["a", "b", "c"]


def test_no_rank_is_ended_by_a_disk_that_is_slower_than_collectives(tmp_path: Path) -> None:
    script = Path(__file__).parent / "run/peers/patient_ranks.py"
    done = finished([*launcher(2), str(script), str(tmp_path)], env=environment())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_cpus_of_gpu_ranks_have_a_group_from_the_start(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    used: list[object] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)

    def new_group(backend: str) -> int:
        made.append(backend)
        return 7

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda value, op, group, async_op: used.append(group)
    )
    greatest = Greatest()
    assert made == ([] if backend == "gloo" else ["gloo"])
    greatest.begin(1)
    greatest.begin(2)
    assert len(made) <= 1 and used == ([None] * 2 if backend == "gloo" else [7] * 2)
