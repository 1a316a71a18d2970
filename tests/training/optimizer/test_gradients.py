"""Clipping by the three norms."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Event
from torch import nn

from pospre.algorithms.mae import MAE
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.recipe.sections import ClipGrad
from pospre.training.optimizer.gradients import build_clipping, module_of
from tests.operators import CountedOperators


@pytest.fixture
def model() -> PretrainModel:
    """Return a model whose gradients are 1, but for those of MAE's last layer: 1e-6."""
    encoder = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=1)
    mae = MAE(decoder_dim=32, decoder_depth=1, decoder_heads=2)
    model = PretrainModel(encoder, [mae], seed=0)
    for name, parameter in model.named_parameters():
        size = 1e-6 if "predict" in name else 1.0
        parameter.grad = torch.full_like(parameter, size) if parameter.requires_grad else None
    return model


def clip(model: nn.Module, **options: Any) -> None:
    """Clip as a recipe says."""
    (clipping,) = build_clipping(ClipGrad(**options))
    state: Any = SimpleNamespace(model=model)
    logger: Any = None
    assert clipping.match(Event.AFTER_TRAIN_BATCH, state)
    assert not clipping.match(Event.BATCH_END, state)
    clipping.apply(Event.AFTER_TRAIN_BATCH, state, logger)


def test_per_tensor_clipping_treats_every_tensor_alone(model: PretrainModel) -> None:
    before = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
    clip(model, mode="per_tensor", threshold=5.0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected = min(before[name].item(), 5.0)
            assert parameter.grad.norm().item() == pytest.approx(expected, rel=1e-4)


def test_per_tensor_clipping_is_pytorchs_to_the_bit_in_a_few_operators(
    model: PretrainModel,
) -> None:
    expected = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.manual_seed(0)
            parameter.grad *= torch.randn(parameter.shape)
            alone = nn.Parameter(parameter.detach().clone())
            alone.grad = parameter.grad.clone()
            nn.utils.clip_grad_norm_([alone], 5.0)
            expected[name] = alone.grad
    with CountedOperators() as operators:
        clip(model, mode="per_tensor", threshold=5.0)
    assert operators.total() <= 10 < len(expected)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected[name]), name


def test_per_module_clipping_has_one_norm_for_the_encoder_and_one_for_each_head(
    model: PretrainModel,
) -> None:
    clip(model, mode="per_module", threshold=3.0)
    norms: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            squared = float(parameter.grad.square().sum())
            norms[module_of(name)] = norms.get(module_of(name), 0.0) + squared
    assert norms["encoder"] ** 0.5 == pytest.approx(3.0, rel=1e-5)
    assert norms["mae.blocks"] ** 0.5 == pytest.approx(3.0, rel=1e-5)
    assert 0 < norms["mae.predict"] < 1e-3  # small ones stay as they are
    assert torch.equal(
        model.objectives["mae"].predict.bias.grad,  # type: ignore[arg-type,union-attr]
        torch.full((192,), 1e-6),
    )


def test_one_norm_of_all_is_pytorchs_to_the_bit(model: PretrainModel) -> None:
    twin = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone()
    assert nn.utils.clip_grad_norm_(twin.parameters(), 3.0) > 3.0
    clip(model, threshold=3.0)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert other.grad is None or torch.equal(parameter.grad, other.grad)  # type: ignore


def test_without_clipping_there_is_no_algorithm() -> None:
    assert build_clipping(None) == []
