"""Rates, durations and straight lines; the published formulas are in test_recipes_schedules."""

import pytest

from pospre.schedules import cosine_warmup, duration_steps, linear


def test_cosine_warmup_goldens() -> None:
    shares = [cosine_warmup(s, warmup_steps=10, total_steps=110) for s in (0, 5, 10, 60, 110, 200)]
    assert shares == pytest.approx([0, 0.5, 1, 0.5, 0, 0], abs=1e-15)
    assert cosine_warmup(0, warmup_steps=0, total_steps=10) == 1


def test_cosine_under_the_warmup_and_a_warmup_with_its_end() -> None:
    shares = [cosine_warmup(s, warmup_steps=5, total_steps=10, prefix=False) for s in (4, 5, 10)]
    assert shares == pytest.approx([0.8, 0.5, 0], abs=1e-15)
    shares = [cosine_warmup(s, warmup_steps=5, total_steps=10, endpoint=True) for s in range(6)]
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert cosine_warmup(0, warmup_steps=1, total_steps=10, endpoint=True) == 0


def test_linear_stays_within_its_ends() -> None:
    assert [linear(1.0, 0.0, f) for f in (-1, 0, 0.25, 1, 2)] == [1, 1, 0.75, 0, 0]


@pytest.mark.parametrize(
    ("duration", "steps"), [("3ep", 30), ("7ba", 7), ("64sp", 8), ("65sp", 9), ("0ep", 0)]
)
def test_duration_steps(duration: str, steps: int) -> None:
    assert duration_steps(duration, steps_per_epoch=10, batch_size=8) == steps
