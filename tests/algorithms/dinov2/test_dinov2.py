"""DINOv2: invariants, options, bad input."""

import copy
import math
from typing import Any

import pytest
import torch

from pospre.algorithms.dinov2.dinov2 import MASK_KEY, DINOv2, PrototypeMatching
from pospre.algorithms.dinov2.losses import koleo
from pospre.data.views.options import ViewGroup
from pospre.model.progress import Progress
from tests.algorithms.cases import random_views, tiny_model

SMALL: dict[str, Any] = {"num_prototypes": 32, "head_hidden": 24, "head_bottleneck": 16}
LOCALS = 3


def small_model(*algorithms, locals_=LOCALS, **encoder):
    views = {"global": ViewGroup(name="global", count=2, size=32)}
    if locals_:
        views["local"] = ViewGroup(name="local", count=locals_, size=16)
    options = {"positions": "learned", "init": "trunc_normal", "layer_scale": 0.5, "depth": 1}
    return tiny_model(*algorithms, views=views, seed=3, **{**options, **encoder})


def make_batch(locals_=LOCALS):
    crops = random_views("local", views=locals_, side=16) if locals_ else {}
    return random_views("global", views=2) | crops


def model_and_batch(*, locals_=LOCALS, encoder=None, **options):
    algorithm = DINOv2(**{**SMALL, **options})
    model = small_model(algorithm, locals_=locals_, **(encoder or {}))
    return model, model.prepare(make_batch(locals_=locals_), Progress(0.0, 0.0)), algorithm


def spread_prototypes(model):
    """Make the heads decided, so that targets differ from sample to sample."""
    with torch.no_grad():
        for name, parameter in model.objectives["dinov2"].named_parameters():
            if ".mlp." in name and parameter.ndim > 1:
                parameter.mul_(10)


def test_gradient_reaches_both_heads_and_their_norms_and_no_teacher():
    model, inputs, _ = model_and_batch(separate_heads=True, train_norm=True)
    model.loss(model(inputs), inputs)["total"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != ("teacher" in name), name
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_the_total_is_the_weighted_sum_of_the_three_losses():
    model, inputs, _ = model_and_batch(
        dino_weight=2.0, ibot_weight=3.0, koleo_weight=0.5, weight=0.7
    )
    terms = model.loss(model(inputs), inputs)
    parts = [terms[f"metric/dinov2_{name}"] for name in ("dino", "ibot", "koleo")]
    expected = 2 * parts[0] + 3 * parts[1] + 0.5 * parts[2]
    torch.testing.assert_close(terms["dinov2"], expected)
    torch.testing.assert_close(terms["total"], 0.7 * expected)


def test_what_forward_returns_does_not_grow_with_the_prototypes():
    sizes = []
    for num_prototypes in (16, 64):
        model, inputs, _ = model_and_batch(num_prototypes=num_prototypes)
        outputs = model(inputs)["dinov2"]
        sizes.append({name: value.untyped_storage().nbytes() for name, value in outputs.items()})
    assert sizes[0] == sizes[1]


def test_koleo_spreads_both_global_crops_or_the_first():
    model, inputs, _ = model_and_batch()
    both = model.loss(model(inputs), inputs)["metric/dinov2_koleo"]
    model, inputs, _ = model_and_batch(koleo_crops="first")
    classes = model.run_pass("global", model.images(inputs, "global"), inputs)[:, 0]
    first, second = (koleo(crop) for crop in classes.unflatten(0, (-1, 2)).unbind(1))
    assert torch.equal(model.loss(model(inputs), inputs)["metric/dinov2_koleo"], first)
    assert torch.equal(both, first + second)


@pytest.mark.parametrize("locals_", [0, 3])
def test_an_undecided_student_costs_log_k_whatever_the_crops(locals_):
    model, inputs, _ = model_and_batch(locals_=locals_)
    with torch.no_grad():
        for parameter in model.objectives.of(PrototypeMatching).head.mlp.parameters():
            parameter.zero_()
    terms = model.loss(model(inputs), inputs)
    assert terms["metric/dinov2_dino"].item() == pytest.approx(math.log(32), rel=1e-5)
    assert terms["metric/dinov2_ibot"].item() == pytest.approx(math.log(32) / 2, rel=1e-5)


def test_the_student_sees_the_mask_token_and_the_teacher_the_image():
    model, inputs, _ = model_and_batch()
    mask = inputs[MASK_KEY].flatten(0, 1)
    assert mask.any(-1).sum() == 4
    images = model.images(inputs, "global")
    other = images.clone()  # change what lies under the masks
    pixels = mask.view(4, 2, 1, 4, 1, 4, 1).expand(-1, -1, 3, -1, 8, -1, 8).reshape_as(images)
    other[pixels] += 1
    passes = {name: model.run_pass(name, images, inputs) for name in ("global", "teacher")}
    assert torch.equal(model.run_pass("global", other, inputs), passes["global"])
    assert not torch.equal(model.run_pass("teacher", other, inputs), passes["teacher"])
    unmasked = inputs | {MASK_KEY: torch.zeros_like(inputs[MASK_KEY])}
    assert torch.equal(model.run_pass("teacher", images, unmasked), passes["teacher"])
    student = model.run_pass("global", images, unmasked)
    changed = (student != passes["global"]).flatten(1).any(1)
    assert torch.equal(changed, mask.any(-1))
    torch.testing.assert_close(student, passes["teacher"])  # one start, and no drop path yet


def test_the_teacher_has_no_drop_path_and_follows_encoder_and_heads():
    model, inputs, _ = model_and_batch(
        encoder={"drop_path": 0.9, "depth": 2}, momentum_start=0.75, separate_heads=True
    )
    images = model.images(inputs, "global")
    assert torch.equal(*(model.run_pass("teacher", images, inputs) for _ in range(2)))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "teacher" not in name:
                parameter.add_(1)
    model.after_step(Progress(0.0, 0.0))
    for name, parameter in model.named_parameters():
        step = 0.25 if "teacher" in name else 1.0
        torch.testing.assert_close(parameter - before[name], torch.full_like(parameter, step))


def test_temperature_warms_up_over_its_share_of_the_training():
    model, _, algorithm = model_and_batch(teacher_warmup=0.3)
    found = []
    for done in (0.0, 0.15, 0.3, 0.9):
        algorithm.schedule(model, Progress(done, 0.0))
        found.append(float(model.objectives.of(PrototypeMatching).temperature))
    assert found == pytest.approx([0.04, 0.055, 0.07, 0.07])
    ramp = [algorithm.temperature(Progress(step / 10, 0.0, 10)) for step in range(5)]
    assert ramp == pytest.approx([0.04, 0.055, 0.07, 0.07, 0.07])  # numpy's linspace over 3 steps
    constant = DINOv2(teacher_warmup=0.0)
    constant.schedule(model, Progress(0.0, 0.0))
    assert float(model.objectives.of(PrototypeMatching).temperature) == pytest.approx(0.07)


def test_each_head_has_its_own_bottleneck() -> None:
    model, inputs, _ = model_and_batch(separate_heads=True, patch_head_bottleneck=8)
    objective = model.objectives.of(PrototypeMatching)
    assert objective.patch_head is not None
    assert (objective.head.last.weight.shape, objective.patch_head.last.weight.shape) == (
        (32, 16),
        (32, 8),
    )
    assert torch.isfinite(model.loss(model(inputs), inputs)["total"])


def test_the_prototypes_of_both_heads_are_declared_frozen_at_first():
    model, _, _ = model_and_batch(separate_heads=True, freeze_epochs=2, train_norm=True)
    objective = model.objectives.of(PrototypeMatching)
    frozen = model.layout.frozen["dinov2"]
    starts = tuple(frozen)
    assert [name for name, _ in objective.named_parameters() if name.startswith(starts)] == [
        "head.last.weight",
        "head.last.scale",
        "patch_head.last.weight",
        "patch_head.last.scale",
    ]
    assert set(frozen.values()) == {2}


def test_the_centre_is_saved_and_moves_in_training_only():
    model, inputs, _ = model_and_batch(centering="centering")
    spread_prototypes(model)
    name = "objectives.named.dinov2.class_targets.center.center_K"
    model(inputs)
    model.after_step(Progress(0.0, 0.0))
    moved = model.state_dict()[name].clone()
    assert moved.any()
    model.eval()
    model(inputs)
    model.after_step(Progress(0.0, 0.0))
    assert torch.equal(model.state_dict()[name], moved)
    again, _, _ = model_and_batch(centering="centering")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.state_dict()[name], moved)


def test_a_shared_head_and_two_equal_ones_agree():
    shared, inputs, _ = model_and_batch()
    apart, _, _ = model_and_batch(separate_heads=True)
    state = shared.state_dict()
    for name in apart.state_dict():
        state.setdefault(
            name,
            state[name.replace("patch_head", "head")]
            if "patch_head" in name
            else apart.state_dict()[name],
        )
    apart.load_state_dict(state)
    ours, theirs = (model.loss(model(inputs), inputs)["total"] for model in (shared, apart))
    torch.testing.assert_close(ours, theirs)


def test_the_published_loss_is_near_in_half_precision():
    model, inputs, _ = model_and_batch(centering="centering", official=True, separate_heads=True)
    model.eval()  # the centre stays
    eager = model.loss(model(inputs), inputs)["total"]
    with torch.autocast("cpu", torch.bfloat16):
        half = model.loss(model(inputs), inputs)["total"]
    torch.testing.assert_close(half, eager, rtol=0.03, atol=0.03)
