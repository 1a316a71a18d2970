"""The copy of a checkpoint that the ranks of a node read together."""

from pathlib import Path

import pytest

from pospre.errors import Unreachable, UserError
from pospre.run.checkpoints import reading
from tests.run.checkpoints.test_saver import full_disk

URI = "s3://bucket/run/ep1-ba4"


def test_a_busy_bucket_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers: list[Unreachable | dict[str, bytes]]
    answers = [Unreachable("503 SlowDown"), {"rest.pt": b"all of it"}]

    def fetch(_: str) -> dict[str, bytes]:
        answer = answers.pop(0)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    monkeypatch.setattr(reading, "_files_of", fetch)
    reading._copy(URI, tmp_path / "ep1-ba4", None)
    assert (tmp_path / "ep1-ba4" / "rest.pt").read_bytes() == b"all of it"


def test_a_node_without_room_is_named(tmp_path: Path) -> None:
    held = {"rest.pt": bytes(20_000)}
    said = f"{URI} cannot be copied to {tmp_path}/ep1-ba4 on .*File too large.*set TMPDIR"
    with full_disk(10_000), pytest.raises(UserError, match=said):
        reading._copy(URI, tmp_path / "ep1-ba4", held)
    reading._copy(URI, tmp_path / "ep1-ba4", held)
    assert held == {}  # the memory is free
