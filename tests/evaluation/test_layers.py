"""The tokens after every block and the attention are those of the forward pass itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.features import pool_tokens
from pospre.evaluation.layers import attention_maps, layer_tokens, planned_encoder
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from tests.evaluation.checkpoints import tiny_recipe
from tests.evaluation.schemes import SCHEME_NAMES
from tests.swin_runs import small_swin

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def model_of(positions: str = "learned", *, num_registers: int = 0) -> PretrainModel:
    encoder = build_encoder(
        "vit_tiny16",
        image_size=32,
        patch_size=8,
        depth=3,
        positions=positions,
        num_registers=num_registers,
    )
    return PretrainModel(encoder, seed=0).eval()


def test_the_last_layer_is_what_the_encoder_returns() -> None:
    model = model_of(num_registers=2)
    first, last = layer_tokens(model, IMAGES, [0, 3])
    assert torch.equal(last, model.encoder(IMAGES))
    assert first.shape == last.shape == (2, 3 + 16, 192)
    assert torch.equal(pool_tokens(model, last, "cls"), last[:, 0])
    assert torch.equal(pool_tokens(model, last, "prefix"), last[:, :3].mean(1))
    torch.testing.assert_close(pool_tokens(model, last, "mean"), last[:, 3:].mean(1))
    (raw,) = layer_tokens(model, IMAGES, [3], norm=False)
    assert torch.equal(model.vit.norm(raw), last)


@pytest.mark.parametrize("positions", [*SCHEME_NAMES, "shared_relative"])
def test_attention_is_what_the_block_uses(positions: str) -> None:
    model = model_of(positions)
    for part in model.encoder.parameters():
        part.data.add_(0.1 * torch.randn_like(part))  # biases of positions are 0 at first
    second: Any = model.vit.blocks[1]
    block, found = second.attn, {}

    def keep(_: torch.nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        found["in"], found["out"] = arguments[0], output

    hook = block.register_forward_hook(keep)
    (maps,) = attention_maps(model, IMAGES, [2])
    hook.remove()
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))
    value = block.qkv(found["in"]).chunk(3, dim=-1)[2].unflatten(2, (3, 64)).transpose(1, 2)
    mixed = block.proj((maps @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixed, found["out"], atol=1e-5, rtol=1e-5)


def test_no_hook_is_left() -> None:
    model = model_of()
    layer_tokens(model, IMAGES, [0, 1])
    attention_maps(model, IMAGES, [1])
    assert not any(
        part._forward_hooks or part._forward_pre_hooks for part in model.encoder.modules()
    )


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "mae", depth=3)
    assert planned_encoder(recipe, [0, 3]).depth == 3
    with pytest.raises(UserError, match="layer 4, but the encoder has 3 blocks"):
        planned_encoder(recipe, [1, 4])
    with pytest.raises(UserError, match="reads the blocks of a ViT"):
        planned_encoder(small_swin(tmp_path, "simmim", {}), [1])
