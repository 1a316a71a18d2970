"""Every recipe's rate, weight decay, momentum and temperature are those of the published code."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.algorithms.dinov2.dinov2 import DINOv2
from pospre.model.algorithm import Progress
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.schedules import duration_steps
from pospre.training.build import build_algorithms, build_model
from pospre.training.optimizer.optim import batch_peak
from pospre.training.optimizer.schedule import StepSchedule, build_schedule
from pospre.training.resolve import resolve
from tests import published_schedules as published

YAMLS = Path(__file__).parents[1] / "yamls"
RECIPES = sorted(YAMLS.glob("**/*.yaml"))
IMAGES = {"cifar100": 50_000, "tiny": 100_000, "dinov2_vitl14": 14_197_122, "paper_": 22_246}
IMAGENET = 1_281_167
SQRT_HALF = math.sqrt(0.5)

mae, deit, ijepa = published.mae, published.deit, published.ijepa
RATES: dict[str, published.RateRule] = {
    **{f"pretrain/mae_{size}": mae(2.4e-3, 40, 800) for size in ("vits16", "vitb16", "vitl16")},
    "pretrain/mae_vith14": mae(2.4e-3, 40, 800),
    "pretrain/mae_pixio_vith16": lambda _: mae(8e-4, 40, 400)(1605),
    "pretrain/loca_vitb16": mae(1e-3, 15, 100, 1e-5),
    "pretrain/mae_sp_vitb16": mae(2.4e-3, 40, 800),
    "pretrain/mae_swint": mae(2.4e-3, 10, 200),
    "pretrain/mae_cifar100_vits4": mae(1.5e-4, 40, 2000),
    "pretrain/mae_tiny_imagenet_vitb8": mae(3e-4, 40, 2000),
    **{f"pretrain/droppos_{size}": mae(2.4e-3, 10, 200) for size in ("vits16", "vitb16", "swint")},
    "pretrain/droppos_vitl16": mae(2.4e-3, 40, 200),
    **{f"pretrain/lut_{size}": mae(2.4e-3, 40, 1600) for size in ("vits16", "vitb16", "vitl16")},
    "pretrain/lut_droppos_vitb16": mae(2.4e-3, 10, 200),
    "pretrain/simmim_vitb16": published.simmim_multistep(4e-4, 10, 700, start=2e-6),
    "pretrain/lut_simmim_vitb16": published.simmim_cosine(4e-4, 10, 100, start=2e-6, floor=2e-5),
    **{f"pretrain/{name}_vitb16": ijepa(2e-4, 8e-4, 1e-4, 15, 600) for name in ("ijepa", "stop")},
    **{f"pretrain/{name}_vitl16": ijepa(2e-4, 8e-4, 1e-4, 15, 600) for name in ("ijepa", "stop")},
    **{f"pretrain/ijepa_{size}": ijepa(2e-4, 1e-3, 1e-6, 40, 300) for size in ("vith14", "vith16")},
    **{
        f"pretrain/stop_{size}": ijepa(2e-4, 1e-3, 1e-6, 40, 300, fixed=250)
        for size in ("vith14", "vith16")
    },
    **{
        f"pretrain/{name}_{size}": published.dinov2(2e-3 * SQRT_HALF, 1e-6, 100, 10)
        for name in ("dinov2", "intertwined")
        for size in ("vits16", "vitb16")
    },
    "pretrain/lejepa_vits16": mae(5e-4, 1, 100, 5e-7),
    "pretrain/dinov2_vitl16": published.dinov2(4e-3 * math.sqrt(2), 1e-6, 200, 20),
    "pretrain/dinov2_vitl14": lambda _: published.dinov2(2e-4 * 3**0.5, 1e-6, 500, 80)(1250),
    "pretrain/supervised_vits16": deit(1e-3, 300),
    "pretrain/supervised_vitb16": deit(1e-3, 300),
    "pretrain/supervised_vitl16": mae(1.6e-3, 20, 200),
    "pretrain/supervised_cifar100_vits4": deit(2.5e-4, 400),
    "pretrain/supervised_tiny_imagenet_vitb8": deit(5e-4, 400),
    "pretrain/mp3_cifar100_vits4": deit(2.5e-4, 2000),
    "pretrain/part_cifar100_vits4": deit(2.5e-4, 2000),
    "pretrain/mp3_tiny_imagenet_vitb8": deit(5e-4, 2000),
    "pretrain/mp3_vitb16": deit(2e-3, 100),
    "pretrain/mp3_vitl16": deit(2e-3, 150),
    "finetune/mae_vits16": mae(2e-3, 5, 300, 1e-6),
    "finetune/mae_vitb16": mae(2e-3, 5, 100, 1e-6),
    "finetune/mae_vitl16": mae(4e-3, 5, 50, 1e-6),
    "finetune/mae_vith14": mae(4e-3, 5, 50, 1e-6),
    "finetune/mae_cifar100_vits4": mae(5e-4, 5, 400, 1e-6),
    "finetune/mae_tiny_imagenet_vitb8": mae(1e-3, 5, 400, 1e-6),
    **{f"finetune/{name}_vitb16": mae(2e-3, 5, 100, 1e-6) for name in ("ijepa", "stop")},
    **{f"finetune/{name}_vitl16": mae(4e-3, 5, 50, 1e-6) for name in ("ijepa", "stop")},
    **{f"finetune/{name}_vitl16_1percent": mae(2e-3, 5, 100, 1e-6) for name in ("ijepa", "stop")},
    "finetune/droppos_swint": mae(2e-3, 5, 100, 1e-6),
    "finetune/droppos_vitb16": mae(4e-3, 5, 100, 1e-6),
    "finetune/droppos_vitl16": mae(4e-3, 5, 50, 1e-6),
    "finetune/lut_vits16": mae(2e-3, 5, 300, 1e-6),
    "finetune/lut_vitb16": mae(1e-3, 5, 100, 1e-6),
    "finetune/lut_vitl16": mae(4e-3, 5, 50, 1e-6),
    **{
        f"finetune/{name}_vitb16": published.simmim_cosine(5e-3, 20, 100, start=1e-6, floor=1e-6)
        for name in ("simmim", "lut_simmim")
    },
    "finetune/mp3_vitb16": deit(2e-3, 150),
    "finetune/mp3_vitl16": deit(2e-3, 150),
    "finetune/mp3_vitb16_no_positions": deit(2e-3, 300),
    "finetune/mp3_cifar100_vits4": deit(2.5e-4, 400),
    "finetune/mp3_tiny_imagenet_vitb8": deit(5e-4, 400),
    "speech/paper_mp3": lambda _: published.speech,
    "speech/paper_supervised": lambda _: published.speech,
}
LAYER_DECAY = {
    "finetune/mae_vits16": 0.75**13,
    "finetune/mae_vitb16": 0.65**13,
    "finetune/mae_vitl16": 0.75**25,
    "finetune/mae_vith14": 0.75**33,
    "finetune/mae_cifar100_vits4": 0.75**13,
    "finetune/mae_tiny_imagenet_vitb8": 0.65**13,
    **{f"finetune/{name}_vitb16": 0.65**13 for name in ("ijepa", "stop")},
    **{f"finetune/{name}_vitl16": 0.75**25 for name in ("ijepa", "stop")},
    **{f"finetune/{name}_vitl16_1percent": 0.75**25 for name in ("ijepa", "stop")},
    "finetune/droppos_swint": 0.85**13,
    "finetune/droppos_vitb16": 0.75**13,
    "finetune/droppos_vitl16": 0.75**25,
    "finetune/lut_vits16": 0.75**13,
    "finetune/lut_vitb16": 0.65**13,
    "finetune/lut_vitl16": 0.65**25,
    "finetune/simmim_vitb16": 0.65**13,
    "finetune/lut_simmim_vitb16": 0.65**13,
    "pretrain/dinov2_vitl16": 0.9**25 * 0.2,  # the patch embedding's
    "pretrain/dinov2_vitl14": 0.2,
}
DECAYS: dict[str, published.ValueRule] = {
    **{
        f"pretrain/{name}_{size}": published.ijepa_decay(600)
        for name in ("ijepa", "stop")
        for size in ("vitb16", "vitl16")
    },
    **{f"pretrain/ijepa_{size}": published.ijepa_decay(300) for size in ("vith14", "vith16")},
    **{f"pretrain/stop_{size}": published.ijepa_decay(300, 250) for size in ("vith14", "vith16")},
    **{
        f"pretrain/{name}_{size}": published.dinov2_value(0.04, 0.4, 100)
        for name in ("dinov2", "intertwined")
        for size in ("vits16", "vitb16")
    },
    "pretrain/dinov2_vitl16": published.dinov2_value(0.04, 0.4, 200),
    "pretrain/dinov2_vitl14": lambda _: published.dinov2_value(0.04, 0.2, 500)(1250),
    "pretrain/supervised_vitl16": lambda _: lambda step: 0.3,
    "pretrain/loca_vitb16": lambda _: lambda step: 0.1,
    "speech/paper_mp3": lambda _: lambda step: 0.0,
    "speech/paper_supervised": lambda _: lambda step: 0.0,
}
MOMENTA: dict[str, published.ValueRule] = {
    **{
        f"pretrain/{name}_{size}": published.ijepa_momentum(epochs)
        for name in ("ijepa", "stop")
        for size, epochs in {"vitb16": 600, "vitl16": 600, "vith14": 300, "vith16": 300}.items()
    },
    **{
        f"pretrain/lut_{name}": published.dinov2_value(0.996, 1.0, epochs)
        for name, epochs in {
            **{"vits16": 1600, "vitb16": 1600, "vitl16": 1600},
            **{"droppos_vitb16": 200, "simmim_vitb16": 100},
        }.items()
    },
    **{
        f"pretrain/{name}_{size}": published.dinov2_value(0.992, 1.0, 100)
        for name in ("dinov2", "intertwined")
        for size in ("vits16", "vitb16")
    },
    "pretrain/dinov2_vitl16": published.dinov2_value(0.992, 1.0, 200),
    "pretrain/dinov2_vitl14": lambda _: published.dinov2_value(0.994, 1.0, 500)(1250),
    "pretrain/supervised_vitl16": lambda _: lambda step: 0.9999,
    "pretrain/supervised_vits16": lambda _: lambda step: 0.99996,
    "pretrain/supervised_vitb16": lambda _: lambda step: 0.99996,
}
TEMPERATURES: dict[str, published.ValueRule] = {
    **{
        f"pretrain/{name}_{size}": published.dinov2_temperature(0.04, 0.04, 30)
        for name in ("dinov2", "intertwined")
        for size in ("vits16", "vitb16")
    },
    "pretrain/dinov2_vitl16": published.dinov2_temperature(0.04, 0.07, 60),
    "pretrain/dinov2_vitl14": lambda _: published.dinov2_temperature(0.04, 0.07, 30)(1250),
}


def title(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def schedule_name(path: Path) -> str:
    """Return whose schedule a recipe has: with rotary positions that of the same without."""
    return title(path).replace("_rotary", "")


def ours(path: Path) -> bool:
    """Return whether a recipe is sized for this project: no published code has its schedule."""
    return path.parent.name in ("adapt", "demo", "first_light", "learn") or path.stem.startswith(
        "demo_"
    )


def test_every_recipe_is_compared() -> None:
    assert set(RATES) == {schedule_name(path) for path in RECIPES if not ours(path)}


def epoch_steps(path: Path, recipe: Recipe) -> int:
    (images,) = [count for part, count in IMAGES.items() if part in path.stem] or [IMAGENET]
    return images // recipe.data.batch_size


def run_steps(recipe: Recipe, per_epoch: int) -> int:
    return duration_steps(
        recipe.trainer.max_duration, steps_per_epoch=per_epoch, batch_size=recipe.data.batch_size
    )


def sampled(recipe: Recipe, per_epoch: int) -> list[int]:
    """Return steps to look at: ends, where a rule changes, some epochs' first and last, between."""
    total, schedule = run_steps(recipe, per_epoch), recipe.schedule
    changes = [0, total, total // 2]
    for duration in (schedule.warmup, schedule.every, schedule.fix_after, *schedule.milestones):
        if duration:
            changes.append(duration_steps(duration, steps_per_epoch=per_epoch, batch_size=1))
    if "dinov2" in recipe.algorithms:
        changes.append(
            round((recipe.algorithms["dinov2"] or {}).get("teacher_warmup", 0.3) * total)
        )
    steps = {change + near for change in changes for near in range(-3, 4)}
    steps.update(range(0, total, max(total // 200, 1)))
    some = per_epoch * max(total // per_epoch // 40, 1)
    steps.update(range(0, total, some), range(some - 1, total, some))
    return sorted(step for step in steps if 0 <= step < total)


def schedule_of(
    recipe: Recipe, per_epoch: int, factor: float
) -> tuple[torch.optim.Optimizer, StepSchedule]:
    """Return the recipe's schedule over two groups: one at the full rate, one at ``factor``."""
    options, batch_size = recipe.optimizer, recipe.data.batch_size
    peak = batch_peak(options, batch_size)
    common = {"weight_decay": options.weight_decay, "decayed": True, "frozen": 0}
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak * scale, **common}
        for scale in (1.0, factor)
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak)
    schedule = build_schedule(
        optimizer,
        recipe.schedule,
        rates=options,
        max_duration=recipe.trainer.max_duration,
        steps_per_epoch=per_epoch,
        batch_size=batch_size,
    )
    return optimizer, schedule


def used(
    recipe: Recipe, per_epoch: int, factor: float, steps: list[int]
) -> Iterator[tuple[float, float, float]]:
    """Yield (rate, rate of the slower group, weight decay) that the optimiser has at each step."""
    optimizer, schedule = schedule_of(recipe, per_epoch, factor)
    optimizer.step()
    state = schedule.state_dict()
    for step in steps:
        if step:  # as a run that was stopped here goes on
            schedule.load_state_dict({**state, "last_epoch": step - 1})
            schedule.step()
        full, slow = optimizer.param_groups
        yield full["lr"], slow["lr"], full["weight_decay"]


def check(found: Sequence[float], expected: list[float], steps: list[int], what: str) -> None:
    """Fail naming the first step at which two curves differ."""
    top = max(map(abs, expected))
    for step, mine, theirs in zip(steps, found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-13 * top), f"{what} of step {step}"


@pytest.mark.parametrize("path", [p for p in RECIPES if not ours(p)], ids=title)
def test_rate_and_decay_are_the_published_codes(path: Path) -> None:
    recipe, name = load_recipe(path), schedule_name(path)
    per_epoch = epoch_steps(path, recipe)
    steps = sampled(recipe, per_epoch)
    factor = LAYER_DECAY.get(name, 1.0)
    full, slow, decays = zip(*used(recipe, per_epoch, factor, steps), strict=True)
    rate = RATES[name](per_epoch)
    check(full, [rate(step, 1.0) for step in steps], steps, "rate")
    check(slow, [rate(step, factor) for step in steps], steps, "rate of the first layer")
    decay = DECAYS.get(name, lambda _: lambda step: 0.05)(per_epoch)
    check(decays, [decay(step) for step in steps], steps, "weight decay")


@pytest.mark.parametrize("path", [p for p in RECIPES if ours(p)], ids=title)
def test_rate_and_decay_of_the_small_recipes_are_maes_rule(path: Path) -> None:
    recipe, per_epoch = load_recipe(path), 390
    steps = sampled(recipe, per_epoch)
    full, _, decays = zip(*used(recipe, per_epoch, 1.0, steps), strict=True)
    options, schedule = recipe.optimizer, recipe.schedule
    peak, total = batch_peak(options, recipe.data.batch_size), run_steps(recipe, per_epoch)
    ramp = duration_steps(schedule.warmup, steps_per_epoch=per_epoch, batch_size=1)
    rate = mae(peak, ramp, total, schedule.min_lr)(1)  # epochs of one step
    expected = [
        schedule.start_lr + (peak - schedule.start_lr) * step / ramp
        if step < ramp
        else rate(step, 1)
        for step in steps
    ]
    check(full, expected, steps, "rate")
    end = options.weight_decay if options.weight_decay_end is None else options.weight_decay_end
    decay = published.dinov2_value(options.weight_decay, end, total)(1)
    check(decays, [decay(step) for step in steps], steps, "weight decay")


def test_every_teacher_is_compared() -> None:
    teachers = {"ijepa", "dinov2", "lut", "ema_teacher"}
    recipes = {schedule_name(path): load_recipe(path) for path in RECIPES if not ours(path)}
    assert set(MOMENTA) == {name for name, r in recipes.items() if teachers & {*r.algorithms}}
    assert set(TEMPERATURES) == {name for name, r in recipes.items() if "dinov2" in r.algorithms}


@pytest.mark.parametrize("path", [p for p in RECIPES if schedule_name(p) in MOMENTA], ids=title)
def test_momentum_and_temperature_are_the_published_codes(path: Path) -> None:
    recipe = load_recipe(path, ["encoder.depth=1"])
    per_epoch = epoch_steps(path, recipe)
    steps, total = sampled(recipe, per_epoch), run_steps(recipe, per_epoch)
    with torch.device("meta"):
        teacher = build_model(recipe).teachers.momentum
    assert teacher is not None
    momentum = MOMENTA[schedule_name(path)](per_epoch)
    found = [teacher.at(step / total) for step in steps]
    check(found, [momentum(step) for step in steps], steps, "momentum")
    for host in build_algorithms(resolve(recipe)):
        if isinstance(host, DINOv2):
            temperature = TEMPERATURES[schedule_name(path)](per_epoch)
            found = [host.temperature(Progress(step / total, 0.0, total)) for step in steps]
            check(found, [temperature(step) for step in steps], steps, "temperature")
