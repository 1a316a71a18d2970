"""The rate and the weight decay of every step, and what contradicts itself."""

from typing import Any

import pytest
import torch
from torch import nn

from pospre.recipe.sections import Optimizer, Schedule
from pospre.schedules import cosine_warmup
from pospre.training.optimizer.optim import batch_peak, build_optimizer
from pospre.training.optimizer.schedule import StepSchedule, build_schedule
from tests.refusals import refuses


def curve(
    options: Schedule, rates: Optimizer, *, batch_size: int = 256, epochs: int = 10, per: int = 2
) -> list[tuple[float, float]]:
    """Return (learning rate, weight decay of matrices) of every step of a run."""
    optimizer, schedule = made(options, rates, batch_size=batch_size, epochs=epochs, per=per)
    used = []
    for _ in range(epochs * per):
        used.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        optimizer.step()
        schedule.step()
    return used


def made(
    options: Schedule, rates: Optimizer, *, batch_size: int = 256, epochs: int = 10, per: int = 2
) -> tuple[torch.optim.Optimizer, StepSchedule]:
    optimizer = build_optimizer(nn.Linear(2, 2), rates, batch_size=batch_size)
    schedule = build_schedule(
        optimizer,
        options,
        rates=rates,
        max_duration=f"{epochs}ep",
        steps_per_epoch=per,
        batch_size=batch_size,
    )
    return optimizer, schedule


def test_step_t_has_the_rate_of_step_t() -> None:
    used = [rate for rate, _ in curve(Schedule(warmup="2ep"), Optimizer(), batch_size=4096)]
    expected = [2.4e-3 * cosine_warmup(t, warmup_steps=4, total_steps=20) for t in range(20)]
    assert used == pytest.approx(expected, rel=1e-12)
    assert used[0] == 0 and used[4] == pytest.approx(2.4e-3)


@pytest.mark.parametrize(
    ("options", "batch", "peak"),
    [
        ({"base_lr": 1e-4, "lr_batch": 512}, 2048, 4e-4),  # SimMIM
        ({"base_lr": 4e-3, "lr_rule": "sqrt", "lr_batch": 1024}, 2048, 4e-3 * 2**0.5),  # DINOv2
        ({"base_lr": 1.5e-4, "lr_rule": "sqrt", "lr_batch": 16}, 4096, 2.4e-3),  # LUT's code
        ({"base_lr": 1e-3, "lr_rule": "none"}, 2048, 1e-3),  # I-JEPA
    ],
)
def test_peak_rates_of_the_papers(options: dict[str, Any], batch: int, peak: float) -> None:
    assert batch_peak(Optimizer(**options), batch) == pytest.approx(peak)


def test_rate_and_decay_of_stop_huge_frozen_after_epoch_250() -> None:
    rates = Optimizer(base_lr=1e-3, lr_rule="none", weight_decay=0.04, weight_decay_end=0.4)
    options = Schedule(warmup="40ep", start_lr=2e-4, min_lr=1e-6, fix_after="250ep")
    used = curve(options, rates, epochs=300, per=1)
    assert used[0] == pytest.approx((2e-4, 0.04))
    assert used[20][0] == pytest.approx(6e-4)
    assert used[40][0] == pytest.approx(1e-3)
    assert used[250] == used[299] and used[249] != used[250]
    assert used[299] == pytest.approx((8.94e-5, 0.376), rel=1e-3)  # measured on the official code


def test_a_cosine_longer_than_the_run() -> None:
    rates = Optimizer(weight_decay=0.0, weight_decay_end=0.4)
    used = curve(Schedule(warmup="0ep", length="20ep"), rates, epochs=10, per=1)
    assert used[5] == pytest.approx((1.5e-4 * 0.8535534, 0.4 * 0.1464466))


def test_multistep_of_simmim_and_steps_of_the_speech_model() -> None:
    options = Schedule(name="multistep", warmup="2ep", milestones=("7ep", "9ep"), start_lr=0.1)
    used = curve(options, Optimizer(base_lr=1.0, lr_rule="none"), epochs=10, per=1)
    expected = [0.1, 0.55, 1, 1, 1, 1, 1, 0.1, 0.1, 0.01]
    assert [rate for rate, _ in used] == pytest.approx(expected)
    options = Schedule(name="step", warmup="2ba", start_lr=0.1, every="4ba", gamma=0.5)
    used = curve(options, Optimizer(base_lr=1.0, lr_rule="none"), epochs=9, per=1)
    expected = [0.1, 0.1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]
    assert [rate for rate, _ in used] == pytest.approx(expected)
    used = curve(Schedule(name="constant", warmup="0ep"), Optimizer(), epochs=3, per=1)
    assert [rate for rate, _ in used] == pytest.approx([1.5e-4] * 3)


def test_the_schedule_goes_on_where_its_state_says() -> None:
    rates = Optimizer(weight_decay_end=0.4)
    optimizer, schedule = made(Schedule(warmup="1ep"), rates)
    for _ in range(7):
        optimizer.step()
        schedule.step()
    again, resumed = made(Schedule(warmup="1ep"), rates)
    state = schedule.state_dict()
    assert all(isinstance(value, (bool, int, float, list)) for value in state.values())
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state)
    for _ in range(3):
        for key in ("lr", "weight_decay"):
            assert again.param_groups[0][key] == optimizer.param_groups[0][key]
        schedule.step()
        resumed.step()


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_optimisers_move_the_weights(name: str) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    options = Optimizer.model_validate({"name": name, "momentum": 0.5})
    optimizer = build_optimizer(model, options, batch_size=256)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert optimizer.param_groups[0].get("momentum", 0.5) == 0.5


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule(warmup="10ep"), r"schedule.warmup = 10ep is 20 steps"),
        (Schedule(warmup="1ep", min_lr=1.0), r"schedule.min_lr = 1.0 is above the peak"),
        (Schedule(warmup="1ep", start_lr=1.0), r"schedule.start_lr = 1.0 is above the peak"),
        (Schedule(warmup="1ep", name="multistep"), r"multistep needs schedule.milestones"),
        (Schedule(warmup="1ep", every="1ep"), r"cosine does not take schedule.every"),
        (Schedule(warmup="1ep", name="step"), r"step needs schedule.every"),
        (Schedule(warmup="1ep", min_lr=1.0, scale_floors=False), r"of the slowest parameters"),
        (Schedule(warmup="1ep", name="constant", warmup_prefix=False), r"only a cosine"),
    ],
)
def test_impossible_schedules(schedule: Schedule, words: str) -> None:
    refuses(words, lambda: made(schedule, Optimizer()))
