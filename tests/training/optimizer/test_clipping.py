"""Clipping by the three norms."""

from types import SimpleNamespace

import pytest
import torch
from composer.core import Event
from torch import nn

from pospre import attach
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.recipe.sections import ClipGrad
from pospre.training.optimizer.clipping import (
    PerModuleClipping,
    PerTensorClipping,
    build_clipping,
    module_of,
)


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


def test_per_module_clipping_has_one_norm_for_the_encoder_and_one_for_each_head() -> None:
    encoder = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=1)
    model = PretrainModel(encoder, seed=0)
    attach(model, "mae", decoder_dim=32, decoder_depth=1, decoder_heads=2)
    for name, parameter in model.named_parameters():
        size = 1e-6 if "predict" in name else 1.0
        parameter.grad = torch.full_like(parameter, size) if parameter.requires_grad else None
    PerModuleClipping(3.0).apply(Event.AFTER_TRAIN_BATCH, SimpleNamespace(model=model), None)  # type: ignore[arg-type]
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


def test_clipping_by_recipe() -> None:
    assert build_clipping(None) == []
    (norm,) = build_clipping(ClipGrad(threshold=1.0))
    assert type(norm).__name__ == "GradientClipping"
    (tensor,) = build_clipping(ClipGrad(mode="per_tensor", threshold=1.0))
    (module,) = build_clipping(ClipGrad(mode="per_module", threshold=1.0))
    assert isinstance(tensor, PerTensorClipping) and isinstance(module, PerModuleClipping)
