"""What fails is tried again, after pauses that grow, until a deadline."""

import pytest

from pospre.attempts import attempts


def test_pauses_grow_and_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], list[float]()

    def sleep(pause: float) -> None:
        now[0] += pause
        pauses.append(pause)

    monkeypatch.setattr("pospre.attempts.time.monotonic", lambda: now[0])
    assert [*attempts(lambda: 60.0, 1.0, 10.0, sleep)] == [*range(1, len(pauses) + 2)]
    assert 50 < now[0] <= 60 and len({*pauses}) > 3  # not all ranks at the same time
    for pause, most in zip(pauses, [1, 2, 4, 8, *[10] * len(pauses)], strict=False):
        assert most / 2 <= pause <= most
    assert [*attempts(lambda: now[0], 1.0, 1.0, sleep)] == [1]  # one attempt, however late
