"""Parameter groups, the rate of every step, and clipping."""

from types import SimpleNamespace

import pytest
import torch
from composer.core import Event
from torch import nn

from pospre.config import recipe_from_dict
from pospre.errors import UserError
from pospre.schedules import cosine_warmup
from pospre.sections import ClipGrad, Optimizer, Schedule
from pospre.training.build import build_model
from pospre.training.optim import (
    PerTensorClipping,
    build_clipping,
    build_optimizer,
    build_schedule,
    parameter_groups,
)


def test_only_vectors_go_without_weight_decay() -> None:
    recipe = recipe_from_dict(
        {
            "run_name": "groups",
            "data": {"path": "x", "batch_size": 8},
            "encoder": {"name": "vit_tiny16", "depth": 1},
            "algorithms": {"droppos": {}},
            "trainer": {"max_duration": "1ep"},
        }
    )
    model = build_model(recipe)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = (
        {names[id(p)] for p in group["params"]}  # type: ignore[attr-defined]
        for group in parameter_groups(model, 0.05)
    )
    assert "encoder.cls_token" in decayed
    assert "encoder.patch_embed.proj.weight" in decayed
    assert {"encoder.patch_embed.proj.bias", "encoder.norm.weight"} <= plain
    assert "encoder.pos_embed" not in decayed | plain  # fixed, not trained
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert decayed | plain == trained and not decayed & plain


def test_step_t_has_the_rate_of_step_t() -> None:
    options = Optimizer(base_lr=1.5e-4)
    optimizer = build_optimizer(nn.Linear(2, 2), options, batch_size=4096)
    schedule = build_schedule(
        optimizer, Schedule(warmup="2ep"), total_steps=20, steps_per_epoch=2, batch_size=4096
    )
    used = []
    for _ in range(20):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = [2.4e-3 * cosine_warmup(t, warmup_steps=4, total_steps=20) for t in range(20)]
    assert used == pytest.approx(expected, rel=1e-12)
    assert used[0] == 0 and used[4] == pytest.approx(2.4e-3)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [(Schedule(warmup="10ep"), "schedule.warmup"), (Schedule(warmup="1ep", min_lr=1.0), "min_lr")],
)
def test_impossible_schedules(schedule: Schedule, words: str) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), Optimizer(), batch_size=256)
    with pytest.raises(UserError, match=words):
        build_schedule(optimizer, schedule, total_steps=20, steps_per_epoch=2, batch_size=256)


def test_per_tensor_clipping_treats_every_tensor_alone() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), 10.0)  # norm 20
    model.bias.grad = torch.tensor([0.3, 0.4])  # norm 0.5
    clip = PerTensorClipping(5.0)
    state = SimpleNamespace(model=model)
    assert clip.match(Event.AFTER_TRAIN_BATCH, state) and not clip.match(Event.BATCH_END, state)  # type: ignore[arg-type]
    clip.apply(Event.AFTER_TRAIN_BATCH, state, None)  # type: ignore[arg-type]
    assert model.weight.grad.norm() == pytest.approx(5.0, rel=1e-5)
    assert model.bias.grad.tolist() == pytest.approx([0.3, 0.4])


def test_clipping_by_recipe() -> None:
    assert build_clipping(None) == []
    (norm,) = build_clipping(ClipGrad(threshold=1.0))
    (tensor,) = build_clipping(ClipGrad(mode="per_tensor", threshold=1.0))
    assert type(norm).__name__ == "GradientClipping" and isinstance(tensor, PerTensorClipping)
