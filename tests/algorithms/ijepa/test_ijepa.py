"""I-JEPA: what it writes, its targets, the teacher, options, bad input."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.algorithms.ijepa.ijepa import IJEPA, FeaturePrediction
from pospre.algorithms.ijepa.predictor import nearness
from pospre.algorithms.stop.stop import StoP
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.progress import Progress
from tests.algorithms.cases import random_views, tiny_model

PREDICTOR: dict[str, Any] = {"predictor_dim": 32, "predictor_depth": 2, "predictor_heads": 4}


def small_model(*algorithms: PretrainAlgorithm, **encoder: Any) -> PretrainModel:
    return tiny_model(*algorithms, **{"image_size": 64, "class_token": False, "seed": 3, **encoder})


def make_batch(epoch: int = 0) -> dict[str, Tensor]:
    return {**random_views(side=64), "epoch": torch.full((4,), epoch)}


def attached(
    encoder: dict[str, Any] | None = None, **options: Any
) -> tuple[PretrainModel, IJEPA, dict[str, Tensor]]:
    algorithm = IJEPA(**{**PREDICTOR, **options})
    model = small_model(algorithm, **(encoder or {}))
    return model, algorithm, model.draw(make_batch())


def test_shapes_and_what_is_written() -> None:
    model, _, inputs = attached()
    assert inputs["view/visible"].shape == (4, 16) and inputs["ijepa/targets"].shape == (4, 4, 9)
    both = torch.cat([inputs["view/visible"], inputs["view/hidden"]], dim=1)
    assert torch.equal(both.sort(1).values, torch.arange(64).expand(4, -1))
    outputs = model(inputs)["ijepa"]
    assert outputs["predicted"].shape == outputs["target"].shape == (4, 4, 9, 192)


def test_targets_are_the_teachers_normalised_features_of_the_whole_image_in_target_order() -> None:
    model, _, inputs = attached()
    with torch.no_grad():
        for parameter in model.teacher.parameters():  # type: ignore[union-attr]
            parameter.add_(0.02 * torch.randn_like(parameter))
    target = model(inputs)["ijepa"]["target"]
    torch.testing.assert_close(target.mean(-1), torch.zeros(4, 4, 9), atol=1e-5, rtol=0)
    torch.testing.assert_close(target.var(-1, correction=0), torch.ones(4, 4, 9), atol=1e-3, rtol=0)
    features = model.teacher(model.images(inputs)[:, 0])  # type: ignore[misc]
    whole = F.layer_norm(features, (192,), eps=1e-5)
    for sample in range(4):
        for block in range(4):
            places = inputs["ijepa/targets"][sample, block]
            torch.testing.assert_close(target[sample, block], whole[sample, places])


def test_the_teacher_follows_after_a_step_and_its_momentum_rises_linearly_to_one() -> None:
    model, _, _ = attached()
    parameters = dict(model.named_parameters())
    weight, old = parameters["teacher.module.norm.weight"], torch.ones(192)
    with torch.no_grad():
        parameters["encoder.norm.weight"].add_(1.0)
    model.after_step(Progress(0.5, 0.0))
    torch.testing.assert_close(weight, old + (1 - 0.998))
    model.after_step(Progress(1.0, 1.0))
    torch.testing.assert_close(weight, old + (1 - 0.998))
    assert model.teachers.momentum is not None
    steps = [model.teachers.momentum.at(step / 1000) for step in range(1000)]
    assert steps[1] - steps[0] == pytest.approx(0.004 / 1000)
    assert steps[0] == 0.996 and steps[-1] == pytest.approx(1 - 0.004 / 1000)


def test_the_loss_is_smooth_l1_or_the_squared_distance() -> None:
    model, _, inputs = attached()
    outputs = model(inputs)
    predicted, target = outputs["ijepa"]["predicted"], outputs["ijepa"]["target"]
    error = (predicted - target).abs()
    smooth = torch.where(error < 1, error.square() / 2, error - 0.5).mean()
    torch.testing.assert_close(model.loss(outputs, inputs)["total"], smooth)
    model.objectives.of(FeaturePrediction).kind = "l2"
    torch.testing.assert_close(model.loss(outputs, inputs)["total"], error.square().mean())


def test_the_context_is_predicted_too_the_nearer_to_a_target_the_more() -> None:
    context, block = torch.tensor([[0, 5, 10]]), torch.tensor([[[15, 3], [10, 11]]])
    weight = nearness(context, block, 4)[0]
    golden = torch.tensor([0.577350, 0.668740, 0.840896])  # d = 3, √5, √2
    torch.testing.assert_close(weight[0], golden, rtol=0, atol=1e-6)
    assert weight[1, 2] == 1  # d is at least 1
    plain, _, inputs = attached()
    model, algorithm, _ = attached(context_weight=0.5)
    assert "context" not in plain(inputs)["ijepa"]
    objective = model.objectives.of(FeaturePrediction)
    for done, ramp in ((0.0, 0.0), (0.1, 0.0), (0.15, 0.25), (0.2, 0.5), (1.0, 0.5)):
        algorithm.schedule(model, Progress(done, done))
        assert float(objective.context_weight) == pytest.approx(ramp, abs=1e-7)
    outputs = model(inputs)
    assert objective.predict_context is not None
    total, targets = model.loss(outputs, inputs)["total"], plain.loss(plain(inputs), inputs)
    torch.testing.assert_close(total, targets["total"] + outputs["ijepa"]["context"] / 2)
    total.backward()
    assert objective.predict_context.weight.grad is not None

    predicted = torch.randn(4, 4, 16, 192)  # of M blocks and K tokens
    whole, visible = torch.randn(4, 64, 192), inputs["view/visible"]
    found = objective.context_distance(predicted, whole, visible, inputs["ijepa/targets"])
    true = whole[torch.arange(4)[:, None], visible][:, None].expand(-1, 4, -1, -1)
    each = F.smooth_l1_loss(predicted, true, reduction="none").mean(-1)
    near = nearness(visible, inputs["ijepa/targets"], 8)
    torch.testing.assert_close(found, (near * each).mean())


def test_before_the_warm_up_it_is_ijepa_to_the_bit() -> None:
    found = []
    for weight in (0.0, 0.5):
        model = small_model(IJEPA(**PREDICTOR, context_weight=weight))
        inputs = model.prepare(make_batch(), Progress(0.1, 0.0))
        loss = model.loss(model(inputs), inputs)["total"]
        loss.backward()
        grads = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
        found.append({**grads, "loss": loss})
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=1e-8)
    assert torch.equal(found[0]["loss"], found[1]["loss"])


def test_stops_coarse_targets_leave_the_loss_of_the_context_as_it_is() -> None:
    host = IJEPA(**PREDICTOR, context_weight=0.5, context_warmup=(0.0, 0.1))
    model = small_model(StoP(variant="lowres_bilinear"), host, init="trunc_normal")
    inputs = model.prepare(make_batch(), Progress(0.5, 0.0))
    outputs, objective = model(inputs)["ijepa"], model.objectives.of(FeaturePrediction)
    expected = objective.target_loss(outputs) + outputs["context"] / 2
    torch.testing.assert_close(objective.loss(outputs, inputs), expected)


def test_metrics_tell_collapse_and_success() -> None:
    model, _, inputs = attached()
    objective, outputs = model.objectives.of(FeaturePrediction), model(inputs)["ijepa"]
    perfect = objective.metrics(outputs | {"predicted": outputs["target"]}, inputs)
    assert float(perfect["cosine"]) == pytest.approx(1.0, abs=1e-5)
    assert float(perfect["spread"]) > 0.1
    same = outputs["target"][:1, :1, :1].expand_as(outputs["target"])
    assert float(objective.metrics(outputs | {"target": same}, inputs)["spread"]) < 1e-5


@pytest.mark.parametrize("encoder", [{"class_token": True}, {"num_registers": 2}])
def test_prefix_tokens_are_not_shown_to_the_predictor(encoder: dict[str, Any]) -> None:
    model, _, inputs = attached(encoder)
    prefix = model.encoder.num_prefix_tokens
    passes = {
        name: model.run_pass(name, model.images(inputs), inputs) for name in model.layout.passes
    }
    before = model.objectives.of(FeaturePrediction)(passes, inputs)["predicted"]
    changed = {name: tokens.clone() for name, tokens in passes.items()}
    for tokens in changed.values():
        tokens[:, :prefix] += 1.0
    assert torch.equal(model.objectives.of(FeaturePrediction)(changed, inputs)["predicted"], before)
    assert prefix and before.shape == (4, 4, 9, 192)


def test_predictor_positions_follow_a_position_field() -> None:
    model, _, inputs = attached()
    before = model(inputs)["ijepa"]["predicted"]
    whole = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(4, 1, 4)
    same = model(inputs | {"view/field_box": whole})["ijepa"]["predicted"]
    torch.testing.assert_close(same, before, rtol=1e-3, atol=1e-5)
    part = model(inputs | {"view/field_box": whole / 2})["ijepa"]["predicted"]
    assert not torch.allclose(part, before, atol=1e-3)


def test_official_masks_share_their_sizes_and_their_counts_vary() -> None:
    model, algorithm, _ = attached({"image_size": 112}, official=True)
    counts = set()
    for epoch in range(20):
        inputs = make_batch(epoch=epoch)
        algorithm.write(inputs, model)
        counts.add((inputs["view/visible"].shape[1], inputs["ijepa/targets"].shape[2]))
        assert (inputs["ijepa/targets"] // 14).max() < 13
    assert len(counts) > 5
