"""Learning rates against MAE's own formula, durations, and straight lines."""

import math

import pytest

from pospre.schedules import cosine_warmup, duration_steps, linear


def mae_rate(epoch: float, *, rate: float, least: float, warmup: int, epochs: int) -> float:
    """The learning rate as MAE's paper repository defines it, in (fractional) epochs."""
    if epoch < warmup:
        return rate * epoch / warmup
    turn = math.pi * (epoch - warmup) / (epochs - warmup)
    return least + (rate - least) * 0.5 * (1.0 + math.cos(turn))


@pytest.mark.parametrize("step", [0, 1, 77, 399, 400, 401, 5000, 7999, 8000])
def test_cosine_warmup_is_maes_rule_per_step(step: int) -> None:
    rate, least = 2.4e-3, 1e-5
    share = cosine_warmup(step, warmup_steps=400, total_steps=8000, floor=least / rate)
    expected = mae_rate(step / 10, rate=rate, least=least, warmup=40, epochs=800)
    assert share * rate == pytest.approx(expected, rel=1e-12)


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
