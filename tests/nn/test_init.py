"""Every published recipe begins where its code begins: the spread of each kind of tensor."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pospre.nn.build import build_encoder
from pospre.nn.vit import as_vit
from pospre.recipe.recipe import load_recipe

PRETRAIN = sorted((Path(__file__).parents[2] / "yamls" / "pretrain").glob("*.yaml"))
CUT = 0.02 * 0.5396  # N(0, 0.02²) cut at one standard deviation


def published_init(name: str) -> str:
    """Return whose code initialises the encoder of a recipe."""
    if "simmim" in name:
        return "simmim"
    codes = {"ijepa": "ijepa", "stop": "ijepa", "dinov2": "dinov2", "intertwined": "dinov2"}
    codes |= dict.fromkeys(("supervised", "mp3", "lejepa", "part"), "deit")
    return codes.get(name.split("_")[0], "mae")


def spreads(init: str, linear: nn.Linear, patch: nn.Conv2d) -> dict[str, float]:
    """Return the standard deviations in a published code (of DeiT: timm 0.3.2)."""
    inputs = patch.weight[0].numel()
    torchs = {"patch": (3 * inputs) ** -0.5, "patch bias": (3 * inputs) ** -0.5}
    if init == "mae":
        widths = (linear.in_features + linear.out_features, inputs + len(patch.weight))
        linear_std, patch_std = ((2 / width) ** 0.5 for width in widths)
        return torchs | {"linear": linear_std, "patch": patch_std, "class": 0.02}
    if init == "simmim":
        return {"linear": CUT, "patch": CUT, "patch bias": 0.0, "class": CUT}
    if init == "ijepa":
        return {"linear": 0.02, "patch": 0.02, "patch bias": 0.0}
    return torchs | {"linear": 0.02, "class": 1e-6 if init == "dinov2" else 0.02}


def spread(values: Tensor | None) -> float:
    assert values is not None
    return float(values.detach().double().square().mean().sqrt())


@cache
def built(arguments: str) -> Any:
    """Return the encoder of these arguments, which several recipes have alike."""
    torch.manual_seed(0)
    return build_encoder(**json.loads(arguments))


@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.stem)
def test_of_every_recipe(path: Path) -> None:
    swin = path.stem.endswith("swint")
    small = ["encoder.name=vits16", "encoder.depth=1"]  # the laws know the widths
    recipe = load_recipe(path, [] if swin else small)
    encoder = built(json.dumps(recipe.encoder.arguments()))
    patch = encoder.patch_embed.proj
    stage = encoder.layers[0] if swin else encoder
    block = stage.blocks[0]
    expected = spreads(published_init(path.stem), block.attn.qkv, patch)
    if swin:  # UM-MAE empties the bias
        expected = {key: value for key, value in expected.items() if key != "class"}
        expected["patch bias"] = 0.0
    found = {"linear": block.attn.qkv.weight, "patch": patch.weight, "patch bias": patch.bias}
    if encoder.has_class_token:
        found["class"] = encoder.cls_token
    assert set(found) == set(expected)
    for kind, values in found.items():
        few = values.numel() < 2000
        assert spread(values) == pytest.approx(expected[kind], rel=0.12 if few else 0.02), kind
    assert not block.attn.qkv.bias.any()
    if encoder.positions.name == "learned":
        assert spread(encoder.positions.pos_embed) == pytest.approx(0.02, rel=0.02)


def test_registers_of_dinov2_carry_no_position() -> None:
    options = {"positions": "learned", "num_registers": 4, "init": "dinov2"}
    encoder = as_vit(
        build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=1, **options)  # type: ignore[arg-type]
    )
    registers = encoder.reg_token
    assert registers is not None and spread(registers) == pytest.approx(1e-6, rel=0.1)
    table = encoder.get_parameter("positions.pos_embed")
    assert table.shape[1] == 1 + 4 + 16
    step = torch.optim.AdamW(encoder.parameters(), lr=0.1, weight_decay=0.1)
    before = registers.detach().clone()
    for _ in range(2):
        encoder(torch.randn(2, 3, 32, 32)).square().mean().backward()
        step.step()
    assert not table[:, 1:5].any() and bool(table[:, [0, 5]].all())
    assert not torch.equal(registers, before)


def test_a_checkpoint_whose_registers_have_positions_opens_as_it_was() -> None:
    options = {"positions": "learned", "num_registers": 2, "image_size": 32, "patch_size": 8}
    old, moved = (build_encoder("vit_tiny16", depth=1, **options).eval() for _ in range(2))  # type: ignore[arg-type]
    state = old.state_dict()
    state["positions.pos_embed"][:, 1:3] = torch.randn(1, 2, 192)
    old.load_state_dict(state)
    state = {key: value.clone() for key, value in state.items()}
    state["reg_token"] += state["positions.pos_embed"][:, 1:3]  # what those rows always did
    state["positions.pos_embed"][:, 1:3] = 0
    moved.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(old(images), moved(images))
