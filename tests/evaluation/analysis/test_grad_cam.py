"""Grad-CAM: its weights by finite differences, and a whole evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.evaluation.analysis.grad_cam import class_maps, covered
from pospre.evaluation.layers import layer_tokens
from pospre.training.build import build_model
from tests.evaluation.analysis.small import Analyse, small_recipe


@pytest.mark.parametrize(("pooling", "layer"), [("cls", 2), ("mean", 2), ("mean", 1)])
def test_the_map_is_what_finite_differences_give(pooling: str, layer: int) -> None:
    supervised = {"num_classes": 3, "pooling": pooling, "head_init": 1.0}
    model = build_model(small_recipe({"supervised": supervised})).double().eval()
    encoder, head = model.vit, model.objectives["supervised"]
    blocks: list[Any] = [*encoder.blocks]
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    wanted = torch.tensor([2, 0])
    (before,) = layer_tokens(model, images, [layer - 1], norm=False)
    tokens = blocks[layer - 1].norm1(before).detach()

    def logit(tokens: Tensor) -> Tensor:
        block = blocks[layer - 1]
        mixed = before + block.attn(tokens)
        mixed = mixed + block.mlp(block.norm2(mixed))
        for later in blocks[layer:]:
            mixed = later(mixed)
        logits = head({"student": encoder.norm(mixed)}, {})["logits"]
        return logits[torch.arange(2), wanted].detach()

    weights, step = torch.zeros(2, encoder.embed_dim).double(), 1e-5
    for channel in range(encoder.embed_dim):
        shift = torch.zeros_like(tokens)
        shift[:, 1:, channel] = step
        weights[:, channel] = (logit(tokens + shift) - logit(tokens - shift)) / (2 * step) / 16
    expected = (tokens[:, 1:] * weights[:, None]).sum(-1).clamp_min(0)
    found, asked = class_maps(model, images, layer, wanted)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    assert asked.tolist() == wanted.tolist() and bool((found > 0).any())
    assert all(each.requires_grad for each in model.objectives.parameters())
    assert not blocks[layer - 1].norm1._forward_hooks


def test_the_covered_share() -> None:
    maps = torch.tensor([[0, 1.0, 2, 4], [0, 0, 0, 0], [3, 3, 3, 3]])
    assert covered(maps).tolist() == [0.5, 0, 1]


@pytest.mark.parametrize("target", ["predicted", "label"])
def test_evaluation_draws_and_measures(analyse: Analyse, target: str) -> None:
    recipe = small_recipe({"supervised": {"num_classes": 2}})
    results = analyse("grad_cam", recipe, batch_size=4, target=target, num_pictures=2)
    assert results["pictures"] == ["grad_cam.png"] and results["samples"] == 6
    assert 0 < results["area"] <= 1 and 0 <= results["empty"] < 1
