"""Swin over packed patches: timm's numbers on whole images, and no road for dropped positions."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from pospre.nn.build import build_encoder
from pospre.nn.encoder_interface import unpatchify
from pospre.nn.places import Places
from pospre.nn.swin.attention import WindowAttention, merged_places, shift_mask
from pospre.nn.swin.encoder import SwinBlock, SwinEncoder

SIDE, PATCHES, VISIBLE = 128, 64, 16


def swin(**options: Any) -> SwinEncoder:
    needs = {"positions": "relative", "class_token": False, "init": "trunc_normal"}
    built: Any = build_encoder("swin_tiny", **{"image_size": SIDE, **needs, **options})
    assert isinstance(built, SwinEncoder)
    return built


@pytest.fixture(scope="module")
def encoder() -> SwinEncoder:
    torch.manual_seed(0)
    encoder = swin(window=4).eval()
    for name, parameter in encoder.named_parameters():
        if "offset_bias" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return encoder


def image_of(contents_KF: Tensor, places_K: Tensor) -> Tensor:
    """Return a grey image (1, 3, 128, 128) that shows flat patches at their places."""
    patches = torch.zeros(1, PATCHES, contents_KF.shape[1])
    patches[0, places_K] = contents_KF
    return unpatchify(patches, (8, 8))


@pytest.mark.parametrize("window", [4, 8])
def test_a_whole_image_gives_timms_features(encoder: SwinEncoder, window: int) -> None:
    other = encoder if window == 4 else swin(window=window).eval()
    other.load_state_dict(encoder.state_dict())  # the weights serve any window
    theirs = timm.create_model(other.timm_name, num_classes=0, **other.timm_kwargs).eval()
    theirs.load_state_dict(other.timm_state(), strict=True)
    images = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        expected = theirs.forward_features(images).flatten(1, 2)  # type: ignore[operator]
        found, by_place = other(images), other(images, torch.arange(PATCHES)[None])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, by_place, atol=1e-5, rtol=1e-5)  # windows share one bias


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("known", [0, 4])
def test_dropped_positions_cannot_leak(encoder: SwinEncoder, known: int, training: bool) -> None:
    encoder.train(training)
    generator = torch.Generator().manual_seed(3)
    contents = torch.randn(VISIBLE, 16 * 16 * 3, generator=generator)
    places = torch.randperm(PATCHES, generator=generator)[:VISIBLE]
    free = torch.tensor([p for p in range(PATCHES) if p not in places[:known]])
    moved = places.clone()
    moved[known:] = free[torch.randperm(len(free), generator=generator)[: VISIBLE - known]]
    hidden = torch.arange(VISIBLE)[None] >= known

    def encode(cells: Tensor, hidden: Tensor) -> Tensor:
        places = Places(encoder.grid, cells[None]).forget(hidden)
        with torch.no_grad():
            return encoder(image_of(contents, cells), cells[None], places)

    assert torch.equal(encode(places, hidden), encode(moved, hidden))
    nothing = torch.zeros_like(hidden)
    assert not torch.allclose(encode(places, nothing), encode(moved, nothing), atol=1e-3)
    encoder.eval()


@pytest.mark.parametrize("training", [False, True])
def test_the_bias_to_and_from_unknown_places_is_zero(encoder: SwinEncoder, training: bool) -> None:
    """And between known ones that of their offset, wherever the others are."""
    attention = encoder.get_submodule("layers.0.blocks.1.attn").train(training)
    assert isinstance(attention, WindowAttention)
    cells = torch.rand(3, 6, 2).mul(attention.reach).floor()
    known = torch.tensor([[1.0, 1, 0, 1, 0, 0]]).expand(3, -1).unsqueeze(-1)
    bias = attention._bias(torch.cat([cells, known], dim=-1))
    both = (known * known.transpose(1, 2)).bool().unsqueeze(1).expand_as(bias)
    assert not bias[~both].any() and bias[both].all()
    everywhere = attention._bias(torch.cat([cells, torch.ones_like(known)], dim=-1))
    assert torch.equal(bias[both], everywhere[both]) and everywhere[~both].all()
    attention.eval()


def test_known_positions_are_used(encoder: SwinEncoder) -> None:
    contents = torch.randn(VISIBLE, 16 * 16 * 3)
    first, second = torch.arange(VISIBLE), torch.arange(VISIBLE) * 3
    tokens = [encoder(image_of(contents, places), places[None]) for places in (first, second)]
    assert tokens[0].shape == (1, VISIBLE // 4, 768)
    assert not torch.allclose(tokens[0], tokens[1], atol=1e-3)


def test_removed_patches_have_no_influence(encoder: SwinEncoder) -> None:
    images = torch.randn(1, 3, SIDE, SIDE)
    keep = torch.arange(VISIBLE)[None]
    changed = images.clone()
    changed[..., 64:, :] += 1
    assert torch.equal(encoder(images, keep), encoder(changed, keep))


def test_shifted_windows_see_only_neighbours() -> None:
    mask = shift_mask(8, 4, 2)
    assert mask.shape == (4, 16, 16)
    assert torch.equal(mask[0], torch.zeros(16, 16))
    assert (mask[3][0] == 0).sum() == 4  # the last window joins the four corners of the map


def test_merged_tokens_know_their_place_only_together() -> None:
    rows, cols = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    whole = torch.stack([rows, cols, torch.ones(4, 4)], dim=-1)[None]
    merged = merged_places(whole)
    assert merged[0, 1, 0].tolist() == [1, 0, 1] and bool((merged[..., 2] == 1).all())
    torn = whole.clone()
    torn[0, 0, 0] = 0  # dropped
    torn[0, 3, 3, :2] = 0  # elsewhere
    known = merged_places(torn)[..., 2]
    assert known[0].tolist() == [[0, 1], [1, 0]]


def test_drop_path_follows_the_keys() -> None:
    encoder = swin(window=4, drop_path=0.5)
    images = torch.randn(1, 3, SIDE, SIDE).expand(3, -1, -1, -1)
    keys = torch.arange(3)
    first = encoder(images, keys_B=keys)
    torch.testing.assert_close(encoder(images[1:], keys_B=keys[1:]), first[1:])
    assert not torch.equal(first[0], first[1])


def test_a_shifted_block_of_a_whole_image_is_one_graph(whole_graph: Any) -> None:
    block = SwinBlock(32, 2, 8, window=4, shifted=True)
    tokens = torch.randn(2, 8, 8, 32)
    compiled = whole_graph(block)(tokens, None, None)
    torch.testing.assert_close(compiled, block(tokens, None, None), atol=1e-5, rtol=1e-5)
