"""The encoder: timm's names and numbers, kept tokens, and its bad input."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch.utils.flop_counter import FlopCounterMode

from pospre.errors import UserError
from pospre.nn.block import residual_factors
from pospre.nn.build import build_encoder
from pospre.nn.encoder_interface import patchify, unpatchify
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.places import Places
from pospre.nn.positions.table import Table
from pospre.nn.sizes import SIZES
from pospre.nn.vit import Encoder
from pospre.nn.weights.timm_models import timm_size, wrap_encoder


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return build_encoder("vit_tiny16", image_size=(48, 64), patch_size=16, depth=2).eval()


def timms(ours):
    """Return timm's model of an encoder's name, with its weights."""
    theirs = timm.create_model(ours.timm_name, num_classes=0, **ours.timm_kwargs).double().eval()
    assert isinstance(theirs, (VisionTransformer, VisionTransformerRelPos))
    theirs.load_state_dict(ours.timm_state(), strict=True)
    return theirs


def narrow(name="vit_tiny16", **options):
    """Return an encoder of this name's kind that is as narrow as three heads can be."""
    size = timm_size(name) if name.startswith("timm:") else SIZES[name]
    kind = {"image_size": 32, "patch_size": 8, "depth": 2, **options}
    return Encoder(replace(size, embed_dim=48, num_heads=3), EncoderOptions(name, **kind))


def drawn(encoder):
    """Give every tensor other values than it begins with; registers have no positions."""
    for parameter in encoder.double().eval().parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    if isinstance(encoder.positions, Table):
        encoder.positions.pos_embed.data[:, encoder.has_class_token : encoder.num_prefix_tokens] = 0
    return encoder


def assert_alike(ours, theirs):
    images = torch.randn(2, ours.channels, *ours.image_size, dtype=torch.float64)
    tokens = ours(images)
    torch.testing.assert_close(tokens, theirs.forward_features(images), atol=1e-9, rtol=0)
    assert tokens.shape[1] == ours.num_prefix_tokens + ours.num_patches


def test_keeping_all_patches_is_keeping_none_back(encoder):
    images = torch.randn(2, 3, 48, 64)
    keep = torch.arange(12).expand(2, -1)
    torch.testing.assert_close(encoder(images, keep), encoder(images), atol=1e-5, rtol=1e-5)


def test_removed_patches_have_no_influence(encoder):
    images = torch.randn(1, 3, 48, 64)
    keep = torch.tensor([[0, 5, 7]])
    before = encoder(images, keep)
    changed = images.clone()
    changed[:, :, :16, 16:] += 1  # patches 1, 2 and 3
    assert torch.equal(encoder(changed, keep), before)


def test_the_order_of_kept_patches_is_the_order_of_the_output(encoder):
    images = torch.randn(1, 3, 48, 64)
    order = torch.randperm(6)
    keep = torch.tensor([[0, 3, 4, 7, 9, 11]])
    straight, shuffled = encoder(images, keep), encoder(images, keep[:, order])
    torch.testing.assert_close(shuffled[:, 1:], straight[:, 1:][:, order], atol=1e-5, rtol=1e-4)


def test_places_are_those_of_the_kept_patches_or_others(encoder):
    images, keep = torch.randn(1, 3, 48, 64), torch.tensor([[2, 8]])
    found = encoder(images, keep)
    assert torch.equal(encoder(images, keep, Places((3, 4), keep)), found)
    moved = encoder(images, keep, Places((3, 4), keep.flip(1)))
    assert not torch.allclose(moved, found, atol=1e-3)
    # the pixels of both exchanged, too: the same tokens in another order
    swapped = encoder(images, keep.flip(1), Places((3, 4), keep.flip(1)).move(keep.flip(1)))
    torch.testing.assert_close(swapped[:, 1:].flip(1), found[:, 1:], atol=1e-5, rtol=1e-4)
    bare = encoder(images, keep, Places((3, 4), keep).forget(torch.ones(1, 2, dtype=torch.bool)))
    other = encoder(images, keep, Places((3, 4), keep.flip(1)).forget(torch.ones(1, 2).bool()))
    assert torch.equal(bare, other) and not torch.allclose(bare, found, atol=1e-3)


def test_content_is_edited_before_places_are_added(encoder):
    images, keep = torch.randn(1, 3, 48, 64), torch.tensor([[2, 8]])
    seen = []

    def edit(tokens):
        seen.append(tokens)
        return tokens * 0

    first = encoder(images, keep, content=edit, layers=[0])[0]
    assert torch.equal(first[:, 1:], encoder.positions.at((3, 4))[keep])
    kernel, pixels = encoder.patch_embed.proj, encoder.pixels(images, keep).flatten(2)
    expected = pixels @ kernel.weight.flatten(1).T + kernel.bias
    torch.testing.assert_close(seen[0], expected, atol=1e-5, rtol=1e-4)


def test_the_tokens_after_each_block(encoder):
    images = torch.randn(1, 3, 48, 64)
    zero, one, two = encoder(images, layers=[0, 1, 2])
    assert torch.equal(encoder.blocks[0](zero), one) and torch.equal(encoder.blocks[1](one), two)
    assert torch.equal(encoder.norm(two), encoder(images))
    assert torch.equal(encoder(images, layers=[2])[0], two)
    with pytest.raises(UserError, match=r"layer 3, but .* 2 blocks\. Give numbers from 0 .* to 2"):
        encoder(images, layers=[2, 3])


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": (48, 64), "patch_size": 16},
        {"class_token": False},
        {"num_registers": 3},
        {"num_registers": 3, "class_token": False},
        {"positions": "none"},
        {"positions": "learned", "layer_scale": 0.1, "init": "trunc_normal"},
        {"positions": "none", "class_token": False, "channels": 2},
        {"positions": "relative", "layer_scale": 0.1},
        {"positions": "shared_relative"},
        {"positions": "relative", "class_token": False},
        {"final_norm": False, "image_size": (32, 16)},
        {"name": "vitg14", "layer_scale": 0.5},
        {"name": "timm:vit_base_patch16_clip_224"},
        {"name": "timm:vit_base_patch16_clip_quickgelu_224"},
        {"name": "speech8", "image_size": (32, 16)},
    ],
)
def test_every_kind_of_encoder_equals_timm(options):
    ours = drawn(narrow(**options))
    assert_alike(ours, timms(ours))


@pytest.mark.parametrize("name", [*SIZES, "timm:vit_base_patch16_clip_quickgelu_224"])
def test_every_size_is_timms(name):
    with torch.device("meta"):
        ours = build_encoder(name, depth=1, image_size=112, patch_size=14, layer_scale=0.5)
        theirs = timm.create_model(ours.timm_name, num_classes=0, **ours.timm_kwargs)
    found, expected = ours.timm_state(), theirs.state_dict()
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_giant_patch14_dinov2"])
def test_queries_and_keys_are_normalised_as_timms(name):
    """No name of our sizes has such norms, so timm's model itself is wrapped."""
    small: dict[str, Any] = {"embed_dim": 48, "num_heads": 3, "depth": 2, "num_classes": 0}
    small |= {"img_size": 32, "patch_size": 8, "init_values": 0.5}
    vit = timm.create_model(name, qk_norm=True, **small)
    ours = drawn(wrap_encoder(vit))
    theirs = vit.double().eval()
    theirs.load_state_dict(ours.timm_state(), strict=True)
    assert_alike(ours, theirs)


def test_drop_path_follows_the_keys_and_keeps_the_mean():
    drop = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, drop_path=0.5)
    images = torch.randn(1, 3, 32, 32).expand(64, -1, -1, -1)
    keys = torch.arange(64)
    assert torch.equal(drop(images, keys_B=keys), drop(images, keys_B=keys))
    fewer = drop(images[:3], keys_B=keys[5:8])
    torch.testing.assert_close(fewer, drop(images, keys_B=keys)[5:8], atol=1e-5, rtol=1e-5)
    branches = residual_factors(torch.arange(4000), 0.5, 2)
    assert branches[0] is not None and torch.equal(branches[0], torch.ones(4000, 2))
    assert branches[1] is not None and float(branches[1].mean()) == pytest.approx(1, abs=0.05)
    assert set(branches[1].unique().tolist()) == {0.0, 2.0}
    same = residual_factors(torch.arange(4000), 0.5, 2, uniform=True)
    assert same[0] is not None and set(same[0].unique().tolist()) == {0.0, 2.0}
    with_none = drop(images)
    torch.testing.assert_close(with_none[0], with_none[1], atol=1e-5, rtol=1e-5)


def test_published_parameter_counts():
    with torch.device("meta"):
        for name, millions in (("vits16", 21.67), ("vitb16", 85.80), ("vitl16", 303.30)):
            count = sum(p.numel() for p in build_encoder(name).parameters())
            assert count / 1e6 == pytest.approx(millions, abs=0.01)


def test_patchify_is_row_major_with_the_channel_fastest():
    images = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    patches = patchify(images, (2, 2))
    assert patches.shape == (2, 6, 12)
    assert patches[0, 4].tolist() == [
        images[0, c, 2 + r, 2 + q].item() for r in (0, 1) for q in (0, 1) for c in (0, 1, 2)
    ]
    assert torch.equal(unpatchify(patches, (2, 3)), images)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_registers": 3, "layer_scale": 0.1},
        {"positions": "relative"},
        {"positions": "shared_relative"},
        {"drop_path": 0.5},
    ],
)
@pytest.mark.parametrize("has_context", [False, True])
def test_prefix_tokens_alone_are_the_first_of_all(options, has_context):
    """The same tokens and gradients; the last block costs less."""
    ours = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, **options).double()
    images, keys = torch.randn(3, 3, 32, 32, dtype=torch.float64), torch.arange(3)
    context = torch.tensor([[1, 5, 9]]).expand(3, -1) if has_context else None
    found, flops = [], []
    for prefix_only in (False, True):
        ours.zero_grad()
        with FlopCounterMode(display=False) as counter:
            tokens = ours(images, context_BM=context, keys_B=keys, prefix_only=prefix_only)
        tokens[:, : ours.num_prefix_tokens].square().sum().backward()
        gradients = [p.grad for p in ours.parameters() if p.requires_grad]
        found.append((tokens[:, : ours.num_prefix_tokens].detach(), gradients))
        flops.append(counter.get_total_flops())
    assert tokens.shape[1] == ours.num_prefix_tokens
    torch.testing.assert_close(found[1], found[0])
    assert flops[1] < 0.75 * flops[0]
