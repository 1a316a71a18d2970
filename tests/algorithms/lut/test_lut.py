"""LUT: invariants of the spec (section 8), variants, hosts, bad input."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pospre.algorithms.lut.lut import LUT, BroaderContext
from pospre.algorithms.mae import MAE
from pospre.data.views.options import ViewGroup
from pospre.model.model import PretrainModel
from pospre.model.progress import Progress
from pospre.nn.build import build_encoder
from pospre.nn.masking import slot_mask
from tests.algorithms.cases import made, random_views, tiny_model
from tests.refusals import refuses

VARIANTS = [
    ("simmim", {"symmetric": True}),
    ("droppos", {"supervision": "tokens"}),
    ("simmim", {"supervision": "both", "symmetric": True}),
    ("mae", {"pool": "class_token", "symmetric": True}),
    ("simmim", {"steer": "both"}),
    ("droppos", {"steer": "both", "supervision": "both", "symmetric": True}),
    ("mae", {"distance": "infonce", "supervision": "both"}),
    ("droppos", {"distance": "smooth_l1"}),
    ("mae", {"target_mask_ratio": 0.5, "symmetric": True}),
    ("simmim", {"target_mask_ratio": 0.75}),
]


def small_model(*algorithms, groups=("view", "second"), second=48, **options):
    views = {g: ViewGroup(name=g, size=second if g == "second" else 48) for g in groups}
    return tiny_model(*algorithms, views=views, seed=5, image_size=48, depth=2, **options)


def random_batch(groups=("view", "second"), size=4):
    inputs: dict[str, torch.Tensor] = {}
    for seed, group in enumerate(groups):
        inputs |= random_views(group, size=size, side=48, seed=seed)
        inputs[f"{group}/box"] = torch.rand(size, 1, 4)
    return inputs


def model_and_batch(host="mae", host_options=None, **options):
    model = small_model(made(host, **(host_options or {})), made("lut", **options))
    return model, model.draw(random_batch())


def gradients(model, inputs):
    model.zero_grad()
    model.loss(model(inputs), inputs)["total"].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_broader_context_gives_the_decoder_no_gradient_and_the_class_token_some():
    model, inputs = model_and_batch()
    terms = model.loss(model(inputs), inputs)
    terms["lut"].backward()
    for name, parameter in model.named_parameters():
        if name.startswith("objectives.named.mae"):
            assert parameter.grad is None, name
    assert model.encoder.cls_token is not None
    assert model.encoder.cls_token.grad is not None and model.encoder.cls_token.grad.any()


def test_without_weight_the_gradients_are_bit_equal_to_the_hosts():
    model, inputs = model_and_batch(symmetric=True, weight=0.0)
    alone = small_model(made("mae"), groups=("view",))
    expected = gradients(alone, inputs)
    got = gradients(model, inputs)
    assert expected.keys() <= got.keys()
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


def test_cosine_loss_starts_near_two_and_lies_in_zero_to_four():
    model, inputs = model_and_batch("ijepa")
    loss = model.loss(model(inputs), inputs)["lut"]
    assert loss.item() == pytest.approx(2, abs=0.5)
    objective = model.objectives.of(BroaderContext)
    point = torch.eye(3).view(1, 1, 3, 3)
    for sign, expected in ((1, 0.0), (-1, 4.0)):
        ends = {"predicted_context": sign * point, "target_context": 5 * point}
        assert objective.loss(ends, {}).item() == pytest.approx(expected, abs=1e-6)


def test_beside_masks_of_cells_the_views_show_different_cells():
    _, inputs = model_and_batch("mae", {"mask_block": 2}, symmetric=True)
    for group in ("view", "second"):
        shown = slot_mask(inputs[f"{group}/visible"], 36).unflatten(1, (3, 2, 3, 2))
        assert set(shown.float().mean((2, 4)).flatten().tolist()) == {0.0, 1.0}
    _, inputs = model_and_batch("simmim", symmetric=True)
    assert inputs["second/visible"].shape == inputs["view/visible"].shape == (4, 12)
    assert not (~inputs["view/masked"] & ~inputs["second/masked"]).any()
    cells = inputs["second/masked"].unflatten(1, (3, 2, 3, 2)).float().mean((2, 4))
    assert set(cells.flatten().tolist()) == {0.0, 1.0}


def test_swapping_the_views_and_their_masks_leaves_the_loss():
    model, inputs = model_and_batch(symmetric=True)
    before = model.loss(model(inputs), inputs)["lut"]
    swapped = dict(inputs)
    for key in ("image", "flip", "visible"):
        swapped[f"view/{key}"], swapped[f"second/{key}"] = (
            inputs[f"second/{key}"],
            inputs[f"view/{key}"],
        )
    swapped["view/hidden"] = torch.cat([inputs["view/visible"], inputs["view/hidden"][:, 9:]], 1)
    torch.testing.assert_close(model.loss(model(swapped), swapped)["lut"], before)


def test_beside_simmim_masked_patches_are_not_pooled():
    model, inputs = model_and_batch("simmim")
    tokens = torch.randn(4, 37, 192)
    passes = {"student": tokens, "teacher/second": tokens}
    before = model.objectives.of(BroaderContext).eval()(passes, inputs)["predicted_context"]
    masked = torch.cat([torch.zeros(4, 1, dtype=torch.bool), inputs["view/masked"]], dim=1)
    changed = torch.where(masked.unsqueeze(-1), 0.0, tokens)
    objective = model.objectives.of(BroaderContext)
    after = objective(passes | {"student": changed}, inputs)["predicted_context"]
    assert torch.equal(before, after)


@pytest.mark.parametrize(("host", "options"), VARIANTS, ids=str)
def test_every_variant_steps_and_reaches_all_parameters(host, options):
    model, inputs = model_and_batch(host, **options)
    reached = gradients(model, inputs)
    assert set(reached) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(gradient.isfinite().all() for gradient in reached.values())


def test_patchwise_targets_come_from_the_same_crop():
    model, inputs = model_and_batch(supervision="tokens")
    for key in ("image", "flip", "box"):
        assert torch.equal(inputs[f"second/{key}"], inputs[f"view/{key}"])
    outputs = model(inputs)["lut"]
    assert outputs["predicted_tokens"].shape == outputs["target_tokens"].shape == (1, 4, 9, 192)


def test_infonce_of_equal_embeddings_is_the_log_of_their_number():
    model, _ = model_and_batch(distance="infonce")
    same = torch.ones(1, 1, 7, 5)
    outputs = {"predicted_context": same, "target_context": same}
    loss = model.objectives.of(BroaderContext).loss(outputs, {})
    assert loss.item() == pytest.approx(math.log(7))


def test_the_teacher_moves_after_a_step_and_its_statistics_too():
    model, inputs = model_and_batch()
    model(inputs)
    objective = model.objectives.of(BroaderContext)
    assert len(model.teachers.pairs) == 2
    assert all(
        torch.equal(theirs, ours)
        for pair in model.teachers.pairs
        for ours, theirs in zip(*(each.parameters() for each in pair), strict=True)
    )
    with torch.no_grad():
        model.encoder.norm.weight.add_(1.0)
    model.after_step(Progress(0.5, 0.0))
    assert model.teacher is not None
    assert model.teacher.module.norm.weight[0].item() == pytest.approx(1 + 0.002, abs=1e-6)
    ours, theirs = objective.head[1], objective.teacher_head.module[1]
    torch.testing.assert_close(theirs.running_mean, 0.002 * ours.running_mean)
    assert theirs.num_batches_tracked == ours.num_batches_tracked == 1


def test_droppos_shares_the_teacher_pass_of_symmetric_lut():
    model, inputs = model_and_batch("droppos", {"affinity": "teacher"}, symmetric=True)
    assert sorted(model.layout.passes) == ["student", "student/second", "teacher", "teacher/second"]
    assert model.layout.passes["teacher"].readers == ("droppos", "lut")
    assert model.layout.passes["student/second"].places == ("droppos",)
    outputs = model(inputs)["droppos"]
    with torch.no_grad():  # the teacher still is the student
        tokens = model.encoder(model.images(inputs)[:, 0])
    expected = objective_affinity(tokens, inputs["view/visible"])
    torch.testing.assert_close(outputs["affinity"], expected)


def objective_affinity(tokens, keep):
    similarity = torch.cosine_similarity(tokens[:, :1], tokens[:, 1:], dim=-1).gather(1, keep)
    return torch.softmax(similarity / 0.1, dim=-1)


def step_flops(**options):
    """Return the operations of a training step of ViT-B per image; nothing is computed."""
    views = {name: ViewGroup(name=name) for name in ("view", "second")}
    with torch.device("meta"):
        algorithms = [MAE(), *([LUT(**options)] if options else [])]
        views = views if options else {"view": views["view"]}
        model = PretrainModel(build_encoder("vitb16"), algorithms, views=views)
        inputs = {"index": torch.arange(2), "epoch": torch.zeros(2, dtype=torch.int64)}
        for group in views:
            inputs[f"{group}/image"] = torch.zeros(2, 1, 3, 224, 224, dtype=torch.uint8)
            inputs[f"{group}/flip"] = torch.zeros(2, 1, dtype=torch.bool)
        model.draw(inputs)
        with FlopCounterMode(display=False) as counter:
            model.loss(model(inputs), inputs)["total"].backward()
    return counter.get_total_flops() / 2


def test_the_papers_variant_costs_1_6_of_mae_and_the_codes_2_65():
    mae = step_flops()
    paper, code = step_flops(symmetric=False), step_flops(symmetric=True)
    assert paper / mae == pytest.approx(1.60, abs=0.03)
    assert code / mae == pytest.approx(2.65, abs=0.05)


def test_what_edits_the_first_view_edits_the_second():
    model = small_model(made("mae"), made("droppos"), made("lut", symmetric=True))
    assert model.layout.passes["student/second"].places == ("droppos",)


def test_one_sample_is_too_few_for_batch_norm_in_training_only():
    model, inputs = small_model(made("mae"), made("lut")), random_batch(size=1)
    refuses(r"cannot train on one sample at a time", lambda: model.draw(inputs))
    model.eval()
    model.draw(inputs)
    assert model.loss(model(inputs), inputs)["lut"].isfinite()
