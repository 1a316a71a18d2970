"""The encoder: timm's names and numbers, kept tokens, and its bad input."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch.utils.flop_counter import FlopCounterMode

from pospre.errors import UserError
from pospre.nn.build import build_encoder
from pospre.nn.decoder import patchify, unpatchify
from pospre.nn.drop_path import residual_factors
from pospre.nn.positions.sincos import sincos_at, sincos_positions
from pospre.nn.positions.table import resample_positions


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return build_encoder("vit_tiny16", image_size=(48, 64), patch_size=16, depth=2).eval()


def test_equals_timm_with_the_same_weights(encoder):
    theirs = timm.create_model(encoder.timm_name, num_classes=0, **encoder.timm_kwargs).eval()
    assert isinstance(theirs, VisionTransformer)
    theirs.load_state_dict(encoder.state_dict(), strict=True)
    images = torch.randn(2, 3, 48, 64)
    torch.testing.assert_close(encoder(images), theirs.forward_features(images))


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


def test_position_editor_sees_and_replaces_the_kept_positions(encoder):
    images, keep = torch.randn(1, 3, 48, 64), torch.tensor([[2, 8]])
    seen = []

    def edit(positions):
        seen.append(positions)
        return positions * 0

    edited = encoder(images, keep, edit)
    assert torch.equal(seen[0][0], encoder.pos_embed[0, 1:][keep[0]])
    assert not torch.allclose(edited, encoder(images, keep))


@pytest.mark.parametrize(
    "options",
    [
        {"class_token": False},
        {"num_registers": 3},
        {"positions": "none"},
        {"positions": "learned", "layer_scale": 0.1, "init": "trunc_normal"},
        {"positions": "none", "class_token": False, "channels": 2},
        {"positions": "relative", "layer_scale": 0.1},
        {"positions": "shared_relative"},
        {"positions": "relative", "class_token": False},
    ],
)
def test_every_kind_of_encoder_equals_timm(options):
    torch.manual_seed(0)
    ours = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, **options).eval()
    theirs = timm.create_model(ours.timm_name, num_classes=0, **ours.timm_kwargs).eval()
    assert isinstance(theirs, (VisionTransformer, VisionTransformerRelPos))
    for name, parameter in ours.named_parameters():
        if "relative_position" in name:
            torch.nn.init.normal_(parameter)
    theirs.load_state_dict(ours.timm_state(), strict=True)
    images = torch.randn(2, ours.channels, 32, 32)
    tokens = ours(images)
    torch.testing.assert_close(tokens, theirs.forward_features(images), atol=1e-5, rtol=1e-5)
    assert tokens.shape[1] == ours.num_prefix_tokens + 16


@pytest.mark.parametrize("kind", ["relative", "shared_relative"])
def test_relative_positions_begin_at_zero_and_tell_places_apart(kind):
    torch.manual_seed(0)
    ours = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, positions=kind).eval()
    bare = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, positions="none")
    bare.load_state_dict(ours.state_dict(), strict=False)
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(ours(images), bare.eval()(images), atol=1e-5, rtol=1e-5)
    for name, parameter in ours.named_parameters():
        if "relative_position" in name:
            torch.nn.init.normal_(parameter)
            assert parameter.shape == ((2 * 4 - 1) ** 2 + 3, 3)
    flipped = torch.cat([images[..., 16:], images[..., :16]], dim=-1)
    assert not torch.allclose(ours(images)[:, 0], ours(flipped)[:, 0], atol=1e-4)


def test_drop_path_follows_the_keys_and_keeps_the_mean():
    torch.manual_seed(0)
    drop = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, drop_path=0.5)
    images = torch.randn(1, 3, 32, 32).expand(64, -1, -1, -1)
    keys = torch.arange(64)
    assert torch.equal(drop(images, keys_B=keys), drop(images, keys_B=keys))
    assert torch.equal(drop(images[:3], keys_B=keys[5:8]), drop(images, keys_B=keys)[5:8])
    branches = residual_factors(torch.arange(4000), 0.5, 2)
    assert branches[0] is not None and torch.equal(branches[0], torch.ones(4000, 2))
    assert branches[1] is not None and float(branches[1].mean()) == pytest.approx(1, abs=0.05)
    assert set(branches[1].unique().tolist()) == {0.0, 2.0}
    same = residual_factors(torch.arange(4000), 0.5, 2, uniform=True)
    assert same[0] is not None and set(same[0].unique().tolist()) == {0.0, 2.0}
    with_none = drop(images)
    assert torch.equal(with_none[0], with_none[1])


def test_views_of_another_size_get_the_table_resampled(encoder):
    small = encoder(torch.randn(2, 3, 32, 32))
    assert small.shape == (2, 1 + 4, 192)
    table = resample_positions(encoder.pos_embed[0, 1:], (3, 4), (2, 2))
    assert table.shape == (4, 192)
    picture = encoder.pos_embed[0, 1:].unflatten(0, (3, 4)).permute(2, 0, 1)[None]
    torchs = torch.nn.functional.interpolate(picture, size=(2, 2), mode="bicubic")
    torch.testing.assert_close(table, torchs[0].flatten(1).T, atol=1e-6, rtol=1e-6)
    constant = resample_positions(torch.ones(12, 5), (3, 4), (7, 2))
    torch.testing.assert_close(constant, torch.ones(14, 5))


def test_sincos_vectors_at_whole_coordinates_are_the_tables():
    row, col = torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij")
    places = torch.stack([col.flatten(), row.flatten()], dim=1)[None]
    found = sincos_at(64, places)[0]
    torch.testing.assert_close(found, sincos_positions(64, 3, 4), atol=1e-5, rtol=1e-5)


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
    ("name", "options", "message"),
    [
        ("vitz16", {}, r"encoder.name is 'vitz16'. Did you mean 'vit"),
        ("vits16", {"image_size": 225}, "225 is not divisible by the patch size 16. Use 224"),
        ("vits16", {"patch_size": 0}, "encoder.patch_size is 0"),
        ("vits16", {"depth": -1}, "encoder.depth is -1"),
        ("vits16", {"image_size": -16}, "encoder.image_size is -16"),
    ],
)
def test_bad_input_names_the_key_and_the_remedy(name, options, message):
    with pytest.raises(UserError, match=message):
        build_encoder(name, **options)


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
    torch.manual_seed(0)
    ours = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, **options).double()
    images, keys = torch.randn(3, 3, 32, 32, dtype=torch.float64), torch.arange(3)
    context = torch.tensor([[1, 5, 9]]).expand(3, -1) if has_context else None
    if has_context and ours.is_relative:
        return  # refused: relative positions need all tokens
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


@pytest.mark.parametrize(
    "images",
    [
        torch.randn(2, 3, 49, 64),
        torch.randn(2, 1, 48, 64),
        torch.randn(3, 48, 64),
        torch.zeros(2, 3, 48, 64, dtype=torch.uint8),
    ],
)
def test_images_that_it_cannot_take_are_said(encoder, images):
    with pytest.raises(UserError, match=r"takes normalised floats \(B, 3, H, W\), .* of 16 and W"):
        encoder(images)
