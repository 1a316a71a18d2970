"""The rate and the weight decay of every step, and what contradicts itself."""

import pytest
import torch
from torch import nn

from pospre.recipe.sections import Optimizer, Schedule
from pospre.schedules import cosine_warmup
from pospre.training.optimizer.optim import build_optimizer
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


def test_a_cosine_longer_than_the_run() -> None:
    rates = Optimizer(weight_decay=0.0, weight_decay_end=0.4)
    used = curve(Schedule(warmup="0ep", length="20ep"), rates, epochs=10, per=1)
    assert used[5] == pytest.approx((1.5e-4 * 0.8535534, 0.4 * 0.1464466))


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
