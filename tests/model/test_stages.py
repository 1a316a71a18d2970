"""Stages: when each tensor trains and how fast, and what no stage can be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.model.teacher import follow
from pospre.nn.build import build_encoder
from pospre.recipe.sections import Optimizer, Schedule
from pospre.schedules import cosine_warmup
from pospre.training.optimizer.optim import build_optimizer, parameter_groups, rate_scale
from pospre.training.optimizer.schedule import StepSchedule, build_schedule
from tests.algorithms.cases import made

HEADS, LAST, ALL = {"train": "heads"}, {"train": {"last": 4}}, {"train": "all"}


def model_of(*names: str, depth: int = 12, **options: Any) -> PretrainModel:
    encoder = build_encoder("vit_tiny16", **{"image_size": 32, "depth": depth, **options})
    return PretrainModel(encoder, [made(name) for name in names or ("mae",)], seed=0)


def staged(
    model: PretrainModel, *stages: dict[str, Any], total: int = 1000, **options: Any
) -> Stages:
    return Stages(model, stages, total_steps=total, steps_per_epoch=10, batch_size=8, **options)


def test_which_tensors_train_when_and_their_ramps() -> None:
    model = model_of(positions="learned")
    stages = staged(
        model, {"until": 0.2, **HEADS}, {"until": "50ep", **LAST}, ALL, fresh=["pos_embed"]
    )
    assert stages.starts == [0, 200, 500]
    head, new = "objectives.named.mae.embed.weight", "encoder.positions.pos_embed"
    assert {head, new} < stages.trained[0]
    assert not any(name.startswith("encoder.") for name in stages.trained[0] - {new})
    added = stages.trained[1] - stages.trained[0]
    blocks = tuple(f"encoder.blocks.{number}." for number in (8, 9, 10, 11))
    assert {name for name in added if not name.startswith(blocks)} == {
        "encoder.norm.weight",
        "encoder.norm.bias",
    }
    late, later = stages.life("encoder.blocks.8.attn.qkv.weight"), stages.life("encoder.cls_token")
    assert (late, later) == ((False, True, True), (False, False, True))
    for step, factor in ((199, 0.0), (200, 0.02), (224, 0.5), (249, 1.0), (250, 1.0), (500, 1.0)):
        assert stages.factor(late, step) == pytest.approx(factor)
        assert stages.factor(stages.life(head), step) == 1.0
    assert stages.factor(later, 500) == pytest.approx(0.02)
    assert stages.entering(200) == added and not stages.entering(201)
    assert "steps 201 to 500: {last: 4}" in stages.describe(1) and stages.dearest == 2


def test_norms_and_short_runs() -> None:
    model = model_of(depth=2)
    norms = staged(model, {"train": {"norms": True}}).trained[0]
    assert {name for name in norms if name.startswith("encoder.blocks.0")} == {
        f"encoder.blocks.0.norm{number}.{part}" for number in (1, 2) for part in ("weight", "bias")
    }
    short = staged(
        model, {"until": 0.1, **HEADS}, {"until": 0.2, "train": {"last": 1}}, ALL, total=4
    )
    assert short.starts == [0, 1, 2]  # every stage has a step
    longer = short.resumed([0, 1], [], 2)
    assert longer.starts == [0, 1, 2]


def test_swins_blocks_count_over_its_stages() -> None:
    encoder = build_encoder("swin_tiny", image_size=256, positions="relative", class_token=False)
    model = PretrainModel(
        encoder, [made("droppos", temperature=None, position_token="zeros")], seed=0
    )
    stages = staged(model, {"until": 0.2, **HEADS}, {"train": {"last": 2}})
    parts = {name.split(".")[1] for name in stages.trained[1] if name.startswith("encoder.")}
    assert parts == {"layers", "norm"}
    last = {name for name in stages.trained[1] if ".layers." in name}
    assert last and all(".layers.3." in name for name in last)


def test_a_longer_run_keeps_the_ends_that_are_past() -> None:
    model = model_of()
    given = {"until": 0.2, **HEADS}, {"until": 0.5, **LAST}, ALL
    longer = staged(model, *given, total=2000)
    assert longer.resumed([0, 200], ["x"], 300).starts == [0, 200, 1000]
    with pytest.raises(UserError, match=r"stages.1.until = 0.5 is step 500, .* at step 600 and"):
        staged(model, *given).resumed([0, 200], [], 600)


def schedule_of(stages: Stages, model: PretrainModel, options: Schedule) -> StepSchedule:
    rates = Optimizer()
    return build_schedule(
        build_optimizer(model, rates, batch_size=8, stages=stages),
        options,
        rates=rates,
        max_duration=f"{stages.total_steps}ba",
        steps_per_epoch=10,
        batch_size=8,
        stages=stages,
    )


def test_a_stage_can_have_a_schedule_of_its_own() -> None:
    model = model_of(depth=2)
    middle = {"until": "10ba", "train": {"last": 1}, "ramp": "2ba", "restart": True}
    stages = staged(model, {"until": "4ba", **HEADS}, middle, ALL, total=20)
    schedule = schedule_of(stages, model, Schedule(warmup="2ba"))
    whole = [cosine_warmup(step, warmup_steps=2, total_steps=20) for step in range(20)]
    own = [0, 0.5, 1, *(cosine_warmup(step, warmup_steps=2, total_steps=6) for step in (3, 4, 5))]
    lives = [group["life"] for group in schedule.optimizer.param_groups]
    for life, ramp in (((True,) * 3, [1.0] * 6), ((False, True, True), [0.5] + [1.0] * 5)):
        share = schedule.lr_lambdas[lives.index(life)]
        found = [share(step) for step in range(20)]
        assert found[:4] == ([0.0] * 4 if not life[0] else whole[:4])
        assert found[4:10] == pytest.approx([a * b for a, b in zip(own, ramp, strict=True)])
        assert found[10:] == whole[10:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Schedule(warmup="6ba"), "stages.1.restart = true.*warmup = 6ba is 6 steps.*has 6"),
        (Schedule(name="constant", warmup="0ba"), "stages.1.restart = true.*nothing to begin anew"),
    ],
)
def test_schedules_that_cannot_restart(options: Schedule, words: str) -> None:
    model = model_of(depth=2)
    middle = {"until": "10ba", "train": {"last": 1}, "restart": True}
    stages = staged(model, {"until": "4ba", **HEADS}, middle, ALL, total=20)
    with pytest.raises(UserError, match=words):
        schedule_of(stages, model, options)


@pytest.mark.parametrize(
    ("decay", "tokens", "first", "last"),
    [(0.9, 0.2542, 0.2824, 0.9), (0.8, 0.0550, 0.0687, 0.8), (0.98, 0.769, 0.785, 0.98)],
)
def test_layer_decay_counts_from_the_whole_depth(
    decay: float, tokens: float, first: float, last: float
) -> None:
    model = model_of()
    for name, expected in {
        "encoder.cls_token": tokens,
        "encoder.blocks.0.mlp.fc1.weight": first,
        "encoder.blocks.11.mlp.fc1.weight": last,
        "encoder.norm.weight": 1.0,
        "objectives.named.mae.embed.weight": 1.0,
    }.items():
        found = rate_scale(model, name, Optimizer(layer_decay=decay))
        assert found == pytest.approx(expected, abs=5e-5 if decay < 0.98 else 5e-4)


def test_what_is_frozen_has_no_gradient_and_new_moments_when_it_trains_again() -> None:
    model = model_of(depth=2)
    stages = staged(model, {"until": "1ba", **ALL}, {"until": "2ba", **HEADS}, ALL, total=3)
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3, weight_decay=0.5, stages=stages))
    weight = dict(model.named_parameters())["encoder.blocks.0.attn.qkv.weight"]
    batch = {"index": torch.arange(4), "epoch": torch.zeros(4, dtype=torch.int64)}
    images = torch.randint(0, 255, (4, 1, 3, 32, 32), dtype=torch.uint8)
    batch |= {"view/image": images, "view/flip": torch.zeros(4, 1, dtype=torch.bool)}
    batch["view/box"] = torch.tensor([0.0, 0, 1, 1]).expand(4, 1, 4)
    seen: list[tuple[Tensor, float | None]] = []
    for step in range(3):
        assert stages.begin(step, optimizer)
        model(dict(batch), progress=step / 3).loss.backward()
        assert (weight.grad is None) == (step == 1)
        optimizer.step()
        model.after_step(step / 3)
        optimizer.zero_grad()
        steps = optimizer.state.get(weight, {}).get("step")
        seen.append((weight.detach().clone(), None if steps is None else float(steps)))
    (first, one), (second, none), (third, again) = seen
    assert (one, none, again) == (1.0, None, 1.0)
    assert torch.equal(first, second) and not torch.equal(second, third)


def test_a_loop_gives_the_views_their_sizes_itself() -> None:
    small, large = (
        model_of(depth=1, image_size=size, patch_size=16, positions="rotary") for size in (32, 64)
    )
    given = {"until": 0.5}, {"sizes": {"view": 64}}
    optimizer = build_optimizer(small, Optimizer(), batch_size=8)
    stages = staged(small, *given)
    assert stages.begin(0, optimizer) and stages.trained[0] == stages.trained[1]
    with pytest.raises(UserError, match=r"stages\.1\.sizes\.view = 64, .* are {view: \[32, 32\]}"):
        stages.begin(500, optimizer)
    large.load_state_dict(small.state_dict())
    assert staged(large, *given).begin(500, build_optimizer(large, Optimizer(), batch_size=8))


def test_the_teacher_of_what_is_frozen_does_not_move() -> None:
    student = torch.nn.Linear(64, 64)
    teacher = torch.nn.Linear(64, 64)
    teacher.load_state_dict(student.state_dict())
    for momentum in (0.992, 0.996, 0.9995) * 50:
        follow([(student, teacher)], momentum)
    assert torch.equal(student.weight, teacher.weight)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"until": 0.2, "train": "heads"}], "stages.0.until = 0.2, but the last stage ends with"),
        ([HEADS, ALL], "stages.0.until is missing"),
        ([{"until": "900ep", **HEADS}, ALL], "stages.0.until = 900ep is step 9000.* has 1000"),
        (
            [{"until": 0.4, **HEADS}, {"until": 0.4, **LAST}, ALL],
            "stages.1.until = 0.4 is step 400",
        ),
        ([{"until": "300ba", **HEADS}, {"until": 0.2, **LAST}, ALL], "must rise"),
        ([{"until": 0.2, **HEADS, "ramp": 0.1}, ALL], "stages.0.ramp = 0.1.*schedule.warmup"),
        ([{"until": 0.9, **HEADS}, {**ALL, "ramp": "101ba"}], "stages.1.ramp = 101ba .* has 100"),
        ([{"until": 0.2, **HEADS}, HEADS], r"stages.1.train = heads trains the same"),
        ([{"train": {"last": 12}}], "stages.0.train.last = 12, but .* 12 blocks; use train: all"),
        ([{"train": "head"}], "'stages.0.train' is 'head'.*expected heads, all"),
        ([{"train": {"last": 0}}], "'stages.0.train.last' is 0.*greater than 0"),
        ([{"until": 1.5, **HEADS}, ALL], "'stages.0.until' is 1.5.*a share of the run"),
        ([{**ALL, "sizes": {"view": "big"}}], "'stages.0.sizes.view.*' is 'big'"),
        ([{"untill": 0.5}], "unknown key 'stages.0.untill'. Did you mean 'until'"),
    ],
)
def test_stages_that_cannot_be(stages: list[dict[str, Any]], words: str) -> None:
    model = model_of()
    with pytest.raises(UserError, match=words):
        staged(model, *stages)
    assert all(p.requires_grad for n, p in model.named_parameters() if ".blocks." in n)


def test_a_method_without_heads_cannot_begin_with_them() -> None:
    model = model_of("mae", depth=2)
    model.objectives.requires_grad_(False)
    with pytest.raises(
        UserError, match=r"stages\.0\.train = heads trains nothing: mae has no head"
    ):
        staged(model, {"until": 0.2, **HEADS}, ALL)
