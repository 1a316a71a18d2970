"""StoP: noise shaped by the context's projection, its ablations, what it cannot stand beside."""

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.algorithms.ijepa.ijepa import IJEPA, FeaturePrediction
from pospre.algorithms.ijepa.predictor import Predictor
from pospre.algorithms.stop.ablations import CoarseTargets, Variant
from pospre.algorithms.stop.stop import StoP
from pospre.model.model import PretrainModel
from pospre.nn.positions.sincos import SinCos
from tests.algorithms.ijepa.test_ijepa import PREDICTOR, make_batch, small_model


def attached(**options: Any) -> tuple[PretrainModel, StoP, dict[str, Tensor]]:
    algorithm = StoP(**options)
    model = small_model(algorithm, IJEPA(**PREDICTOR), init="trunc_normal")
    return model, algorithm, model.draw(make_batch())


def predictor_of(model: PretrainModel) -> Predictor:
    return model.objectives.of(FeaturePrediction).predictor


def masked_tokens(model: PretrainModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return what mask tokens are before positions are added."""
    return predictor_of(model).masked_tokens(inputs["ijepa/targets"], inputs)


def plain_loss() -> tuple[PretrainModel, Tensor]:
    model = small_model(IJEPA(**PREDICTOR), init="trunc_normal")
    inputs = model.draw(make_batch())
    return model, model.loss(model(inputs), inputs)["total"]


def test_without_noise_it_is_ijepa_to_the_bit_in_loss_and_gradient_but_not_as_published() -> None:
    plain, expected = plain_loss()
    expected.backward()
    for options in (
        {"noise_std": 0.0},
        {"variant": "both", "noise_std": 0.0},
        {"variant": "sincos", "noise_std": 0.25},
    ):
        model, _, inputs = attached(**options)
        loss = model.loss(model(inputs), inputs)["total"]
        loss.backward()
        assert torch.equal(loss, expected)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-8)
    model, _, inputs = attached(official=True, noise_std=0.0)
    assert not torch.equal(model.loss(model(inputs), inputs)["total"], expected)


def test_the_paper_form_equals_a_few_plain_lines() -> None:
    model, _, inputs = attached(noise_std=0.5)
    predictor, head = predictor_of(model), model.objectives.of(FeaturePrediction).predict
    assert isinstance(predictor.positions, SinCos)
    table = predictor.positions.at(predictor.grid)
    tokens = model.run_pass("student", model.images(inputs), inputs)
    weight, bias = predictor.embed.weight, predictor.embed.bias
    rows = []
    for sample in range(4):
        keep = inputs["view/visible"][sample]
        context = tokens[sample] @ weight.T + bias + table[keep]
        for block in range(4):
            places = inputs["ijepa/targets"][sample, block]
            noise = 0.5 * inputs["stop/masked"][sample, block]
            masked = table[places] + noise @ weight.T + predictor.mask_token[0]
            rows.append(torch.cat([context, masked]))
    decoded = predictor.norm(predictor.blocks(torch.stack(rows)))[:, 16:]
    whole = F.layer_norm(model.run_pass("teacher", model.images(inputs), inputs), (192,))
    target = [whole[b, inputs["ijepa/targets"][b, m]] for b in range(4) for m in range(4)]
    expected = F.smooth_l1_loss(head(decoded), torch.stack(target))
    loss = model.loss(model(inputs), inputs)["total"]
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    pairs = zip(
        torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained), strict=True
    )
    for ours, theirs in pairs:
        assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm()) + 1e-7


def test_the_noise_has_mean_mask_token_and_covariance_of_the_projection() -> None:
    model, _, inputs = attached(noise_std=0.5)
    weight = predictor_of(model).embed.weight.detach()
    rows = []
    for epoch in range(60):
        inputs = model.draw(make_batch(epoch=epoch))
        rows.append(masked_tokens(model, inputs).detach().flatten(0, 2))
    noise = torch.cat(rows) - predictor_of(model).mask_token.detach()[0]
    expected = 0.25 * weight @ weight.T
    scale = float(expected.diagonal().mean())
    assert float(noise.mean(0).abs().max()) < 5 * (scale / len(noise)) ** 0.5
    covariance = noise.T @ noise / len(noise)
    assert float((covariance - expected).abs().max()) < 6 * scale * (2 / len(noise)) ** 0.5


def test_there_is_no_noise_at_evaluation() -> None:
    _, expected = plain_loss()
    for variant in ("masked", "both", "fixed_cov"):
        model, _, _ = attached(variant=variant)
        inputs = model.eval().draw(make_batch())
        assert torch.equal(model.loss(model(inputs), inputs)["total"], expected)


@pytest.mark.parametrize("variant", get_args(Variant))
def test_every_variant_trains_what_it_has(variant: Any) -> None:
    model, _, inputs = attached(variant=variant)
    loss = model.loss(model(inputs), inputs)["total"]
    loss.backward()
    for name, parameter in model.objectives.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
    same = torch.equal(loss, plain_loss()[1])
    assert same == (variant == "sincos")
    assert ("stop/masked" in inputs) == (variant in ("masked", "both", "fixed_cov"))
    assert ("stop/context" in inputs) == (variant in ("context", "both"))


@pytest.mark.parametrize("variant", ["lowres_maxpool", "learned_pos"])
def test_variants_compile_to_one_graph(variant: Any, whole_graph: Any) -> None:
    model, _, inputs = attached(variant=variant)
    expected = model.loss(model(inputs), inputs)["total"]
    compiled = whole_graph(model)
    torch.testing.assert_close(model.loss(compiled(inputs), inputs)["total"], expected)


def test_fixed_covariance_has_unit_shape_in_the_predictors_width() -> None:
    model, _, inputs = attached(variant="fixed_cov", noise_std=0.5)
    assert inputs["stop/masked"].shape == (4, 4, 9, 32)
    noise = masked_tokens(model, inputs) - predictor_of(model).mask_token
    torch.testing.assert_close(noise, 0.5 * inputs["stop/masked"], atol=1e-6, rtol=0)


def test_context_and_target_noise_are_independent() -> None:
    _, _, inputs = attached(variant="both")
    context, masked = inputs["stop/context"][:, :9], inputs["stop/masked"][:, 0]
    both = torch.stack([context.flatten(), masked.flatten()])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.06


def test_l1_adds_the_weighted_sum_of_the_projection() -> None:
    _, expected = plain_loss()
    for options, used in (({}, 1e-5), ({"l1_weight": 1e-3}, 1e-3)):
        model, _, inputs = attached(variant="l1", **options)
        penalty = used * predictor_of(model).embed.weight.abs().sum()
        torch.testing.assert_close(model.loss(model(inputs), inputs)["total"], expected + penalty)


@pytest.mark.parametrize(("pooling", "value"), [("bilinear", 10.5), ("maxpool", 13.0)])
def test_coarse_targets_are_the_halved_map_repeated(pooling: Any, value: float) -> None:
    model, _, _ = attached(variant=f"lowres_{pooling}")
    scale = model.objectives.of(FeaturePrediction)
    assert isinstance(scale, CoarseTargets)
    scale.grid = (6, 4)
    coarse = scale.coarse(torch.arange(24.0).view(1, 24, 1)).view(6, 4)
    assert coarse[2, 0] == coarse[3, 1] == value
    blocks = coarse.view(3, 2, 2, 2)
    assert (blocks == blocks[:, :1, :, :1]).all()


def test_low_resolution_loss_is_the_mean_of_both_scales() -> None:
    model, _, inputs = attached(variant="lowres_bilinear")
    outputs = model(inputs)
    parts = outputs["ijepa"]
    fine = F.smooth_l1_loss(parts["predicted"], parts["target"])
    coarse = F.smooth_l1_loss(parts["coarse_predicted"], parts["coarse_target"])
    torch.testing.assert_close(model.loss(outputs, inputs)["total"], (fine + coarse) / 2)
    assert not torch.equal(parts["target"], parts["coarse_target"])


def test_metrics_say_both_readings_of_sigma_and_what_is_traded() -> None:
    model, _, inputs = attached(noise_std=0.5)
    terms = model.loss(model(inputs), inputs)
    assert float(terms["metric/ijepa_noise_std"]) == 0.5
    assert float(terms["metric/ijepa_noise_variance"]) == 0.25
    predictor = predictor_of(model)
    torch.testing.assert_close(
        terms["metric/ijepa_projection_norm"], predictor.embed.weight.detach().norm()
    )
    torch.testing.assert_close(
        terms["metric/ijepa_token_norm"], predictor.mask_token.detach().norm()
    )
