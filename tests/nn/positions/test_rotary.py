"""Axial rotary positions: golden numbers, timm as the oracle, and how places are augmented."""

import math
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    apply_rot_embed_cat,
)
from torch import Tensor

from pospre import draws
from pospre.nn.places import Places
from pospre.nn.positions.rotary import Rotary
from pospre.nn.positions.scheme import TransformerDims, rotate
from pospre.nn.weights.names import interleaved
from tests.nn.positions.golden import DIMS, GRID, PLACES, check, checksum, queries, turned

WIDE = TransformerDims(dim=128, num_heads=2, depth=1, grid=(14, 14))
ROPE_VIT: dict[str, Any] = {"coordinates": "cells", "columns_first": True}
EVA_02: dict[str, Any] = {"coordinates": "reference", "base": 10000.0}


def rotary(dims: TransformerDims = DIMS, **options: Any) -> Rotary:
    scheme = Rotary(dims, **options)
    scheme.reset_parameters()
    return scheme


def angles(scheme: Rotary, places: Places = PLACES, token: int = 11) -> Tensor:
    return scheme.angles(places, 0)[0, 0, token]


def test_periods() -> None:
    check(rotary().periods, "1 3.162278 10 31.622777")
    check(rotary(period_range=(0.5, 8.0)).periods, ".5 1.259921 3.174802 8")
    exact, rounded = (rotary(WIDE, bf16_periods=on).periods for on in (False, True))
    check(exact[[2, 6, 10]], "1.778279 5.623413 17.782794")
    check(exact[[1, 3, 5]], "1.333521 2.371374 4.216965")
    check(rounded[[1, 3, 5]], "1.3359375 2.375 4.21875", places=7)


@pytest.mark.parametrize(
    ("normalize", "last", "sums", "first", "middle", "total"),
    [
        ("separate", "4.18879 1.324612 .418879 .132461 4.712389 1.490188 .471239 .149019",
         "0 116.28839 89.37718", ".534641 .166516 .047194 -.013793",
         "-.846025 .691428 .745233 -.936381", ".219490"),
        ("max", "1.570796 .496729 .15708 .049673 4.712389 1.490188 .471239 .149019",
         "-4.79369 119.44571 99.09814", ".04 .2782 .086132 -.029294", "-1 .654526 .741742 -.936024",
         ".597152"),
        ("min", "4.18879 1.324612 .418879 .132461 8.37758 2.649223 .837758 .264922",
         "14.06232 103.6759 80.55351", ".534641 .166516 .047194 -.013793",
         "-.846025 .691428 .745233 -.936381", ".517433"),
    ],
)  # fmt: skip
def test_dinov3(normalize: str, last: str, sums: str, first: str, middle: str, total: str) -> None:
    scheme = rotary(normalize=normalize)
    check(angles(scheme), last)
    both = scheme.angles(PLACES, 0).double().repeat(1, 1, 1, 2)
    check(torch.stack([both.sin().sum(), both.cos().sum(), both.sin().abs().sum()]), sums, places=5)
    query = turned(scheme, queries())[0, 0]
    check(query[0, :4], first)
    check(query[0, 8:12], middle)
    check(torch.tensor(checksum(query)), total)


def test_rope_vit_counts_cells_columns_first() -> None:
    scheme = rotary(**ROPE_VIT)
    check(1 / scheme.periods, "1 .316228 .1 .031623")
    check(angles(scheme), "3 .948683 .3 .094868 2 .632456 .2 .063246")
    query = turned(scheme, queries(), interleaved=True)
    check(query[0, 0, 5, :4], "-.492046 1.028976 -.537089 -.480870")
    check(torch.tensor(checksum(query)), "-.097690")


def test_eva_02_counts_cells_of_16_by_16() -> None:
    check(angles(rotary(**EVA_02)), "10.666667 1.066667 .106667 .010667 12 1.2 .12 .012")


def test_in_a_box() -> None:
    box = torch.tensor([[0.25, 0.1, 0.75, 0.6], [0.75, 0.1, 0.25, 0.6]])
    scheme = rotary()
    plain, mirrored = scheme.angles(Places((2, 2)).within(box), 0)[:, 0]
    check(plain[3], "-.314159 -.099346 -.031416 -.009935 1.570796 .496729 .15708 .049673")
    torch.testing.assert_close(mirrored, plain[[1, 0, 3, 2]])
    check(plain[:, ::4] / (2 * math.pi), "-.55 -.25 -.55 .25 -.05 -.25 -.05 .25")


# --- timm


def oracle(kind: str, grid: tuple[int, int]) -> tuple[Tensor, bool]:
    """Return timm's sines and cosines, and whether channels i and i + D/2 are a pair."""
    if kind in ("rope_vit", "eva_02"):
        like: dict[str, Any] = (
            {"temperature": 100.0, "grid_indexing": "xy"}
            if kind == "rope_vit"
            else {"temperature": 10000.0, "ref_feat_shape": [16, 16], "grid_indexing": "ij"}
        )
        return RotaryEmbeddingCat(64, in_pixels=False, **like).get_embed([*grid]), False
    periods: dict[str, Any] = {}
    if kind == "range":
        periods, kind = {"min_period": 0.5, "max_period": 90.0}, "separate"
    theirs = RotaryEmbeddingDinoV3(64, normalize_coords=kind, **periods)
    return theirs.get_embed([*grid]), True


OWN: dict[str, dict[str, Any]] = {
    "separate": {},
    "max": {"normalize": "max"},
    "min": {"normalize": "min"},
    "range": {"period_range": (0.5, 90.0)},
    "rope_vit": ROPE_VIT,
    "eva_02": EVA_02,
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("grid", [(14, 14), (5, 9)])
def test_equals_timm(kind: str, grid: tuple[int, int]) -> None:
    tokens = torch.randn(2, 2, grid[0] * grid[1], 64, generator=torch.Generator().manual_seed(0))
    embed, is_half = oracle(kind, grid)
    wanted = apply_rot_embed_cat(tokens, embed, half=is_half)

    def ours(scheme: Rotary, *, half: bool = is_half) -> Tensor:
        angle = scheme.angles(Places(grid), 0)
        rotation = angle.cos(), angle.sin()
        if half:
            return rotate(tokens, rotation)
        order = tokens.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(order, rotation).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    scheme = rotary(WIDE, **OWN[kind])
    swapped = rotary(WIDE, **{**OWN[kind], "columns_first": not scheme.columns_first})
    for wrong in (tokens, ours(swapped), ours(scheme, half=not is_half)):
        assert (wrong - wanted).abs().max() > 0.5
    torch.testing.assert_close(ours(scheme), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_weights_that_pair_neighbours_turn_alike_once_permuted(kind: str) -> None:
    draw, name = torch.Generator().manual_seed(0), f"blocks.0.attn.qkv.{kind}"
    shape = (3 * 128, 10) if kind == "weight" else (3 * 128,)
    published = {name: torch.randn(shape, generator=draw), "blocks.0.mlp.fc1.bias": torch.ones(4)}
    own = interleaved(published, 2, back=True)
    embed, _ = oracle("rope_vit", (2, 5))
    angle = rotary(WIDE, **ROPE_VIT).angles(Places((2, 5)), 0)

    def heads(state: dict[str, Tensor], part: int) -> Tensor:
        rows = state[name].view(3, 2, 64, -1)[part]  # of one token at every place
        return rows.transpose(1, 2)[:, :1].expand(-1, 10, -1)[None]

    def logits(query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)

    wanted = logits(*(apply_rot_embed_cat(heads(published, part), embed) for part in (0, 1)))

    def ours(state: dict[str, Tensor]) -> Tensor:
        return logits(*(rotate(heads(state, part), (angle.cos(), angle.sin())) for part in (0, 1)))

    torch.testing.assert_close(ours(own), wanted, rtol=0, atol=1e-4)
    assert (ours(published) - wanted).abs().max() > 1
    assert torch.equal(own[name].chunk(3)[2], published[name].chunk(3)[2])
    back = interleaved(own, 2, back=False)
    assert all(torch.equal(back[key], published[key]) for key in published)


# --- augmentation


def draw_of(*wanted: float, shift: float, jitter: float, rescale: float) -> Tensor:
    """Return the uniform draws (1, 5) of which come these shifts, stretches and scale."""
    signed = [value / shift for value in wanted[:2]]
    signed += [math.log(value) / math.log(jitter) for value in wanted[2:4]]
    signed += [math.log(wanted[4]) / math.log(rescale)]
    return (torch.tensor([signed]) + 1) / 2


def test_places_are_shifted_stretched_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"shift": 0.5, "jitter": 1.2, "rescale": 2.0}
    draw = draw_of(0.1, -0.2, 1.1, 0.9, 1.5, **options)
    monkeypatch.setattr(draws, "uniform", lambda keys, count: draw)
    check(
        angles(rotary(**options), Places(GRID, keys=torch.zeros(1, dtype=torch.int64))),
        "7.948229 2.513451 .794823 .251345 4.665265 1.475286 .466527 .147529",
    )


def test_equals_timm_in_training_with_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"shift": 0.5, "jitter": 1.2, "rescale": 2.0}
    names = ("shift_coords", "jitter_coords", "rescale_coords")
    limits = dict(zip(names, options.values(), strict=True))
    theirs = RotaryEmbeddingDinoV3(64, **limits).train()
    torch.manual_seed(7)
    wanted = theirs.get_embed([5, 9]).unflatten(-1, (2, 64))[:, :, :32]
    torch.manual_seed(7)
    drawn = [*torch.empty(2).uniform_(-0.5, 0.5)]
    for count, factor in ((2, 1.2), (1, 2.0)):
        drawn += [*torch.empty(count).uniform_(-math.log(factor), math.log(factor)).exp()]
    check(torch.stack(drawn), ".034923 -.301197 1.059774 1.058877 .690409")
    draw = draw_of(*map(float, drawn), **options)
    monkeypatch.setattr(draws, "uniform", lambda keys, count: draw)
    scheme = rotary(WIDE, **options)
    places = Places((5, 9), keys=torch.zeros(1, dtype=torch.int64))
    own = scheme.angles(places, 0)[0, 0]
    torch.testing.assert_close(torch.stack([own.sin(), own.cos()], 1), wanted, rtol=0, atol=1e-5)
    assert (scheme.eval().angles(places, 0)[0, 0] - own).abs().max() > 0.1


def test_each_view_has_its_own_draw_by_its_key_in_training_alone() -> None:
    scheme = rotary(shift=0.25, jitter=2.0, rescale=4.0)
    keys = torch.arange(4000)
    found = scheme.angles(Places(GRID, keys=keys), 0)[:, 0, :, ::4] / (2 * math.pi)
    alone = scheme.angles(Places(GRID, keys=keys[7:8]), 0)[:, 0, :, ::4] / (2 * math.pi)
    torch.testing.assert_close(alone[0], found[7])
    first, last = found[:, 0], found[:, 11]
    stretch = (last - first) / torch.tensor([4 / 3, 3 / 2])
    shift = (first + last) / 2 / stretch
    assert shift.abs().max() < 0.2501 and (shift.mean(0).abs() < 0.012).all()
    torch.testing.assert_close(shift.var(0), torch.full((2,), 0.25**2 / 3), rtol=0.1, atol=0)
    jitter, rescale = (2 * math.log(factor) for factor in (2.0, 4.0))
    between, alike = stretch.log().diff(dim=1)[:, 0], stretch.log().mean(1)
    assert stretch.max() < 8 and stretch.min() > 1 / 8
    assert abs(between.var() / (2 * jitter**2 / 12) - 1) < 0.1
    assert abs(alike.var() / (jitter**2 / 24 + rescale**2 / 12) - 1) < 0.1
    still = rotary().angles(PLACES, 0)
    assert torch.equal(scheme.angles(PLACES, 0), still)  # a teacher has no keys
    assert torch.equal(scheme.eval().angles(Places(GRID, keys=keys), 0), still)


def test_a_decoder_has_the_same_draw() -> None:
    scheme = rotary(shift=0.25, rescale=4.0, base=30.0)
    other = scheme.companion(TransformerDims(dim=32, num_heads=2, depth=1, grid=GRID))
    assert isinstance(other, Rotary)
    other.reset_parameters()
    places = Places(GRID, keys=torch.arange(3))
    torch.testing.assert_close(other.angles(places, 0), scheme.angles(places, 0))


# --- more directions (Spiral RoPE) and the golden ones

SPIRAL: dict[str, Any] = {"coordinates": "cells", "period_range": (1 / 1.5, 1000 / 1.5)}


def test_spiral() -> None:
    scheme = rotary(directions=4, **SPIRAL)
    check(angles(scheme), "3 .3 .053033 .005303 4.5 .45 .010607 .001061")  # row 2, column 3
    swapped = rotary(directions=4, columns_first=True, **SPIRAL)
    check(angles(swapped), "4.5 .45 .010607 .001061 3 .3 .053033 .005303")


def test_golden_directions_cover_the_circle() -> None:
    scheme = rotary(directions="golden")
    check(scheme.headings.flip(0)[:, 0, :3].T, ".968979 .247143 .022601 -.999745 -.751688 .659518")
    check(scheme.periods, "1 1.778279 3.162278 5.623413 10 17.782794 31.622777 56.234133")
    many = rotary(TransformerDims(dim=2000, num_heads=5, depth=1, grid=GRID), directions="golden")
    down, across = many.headings.double()
    assert (
        torch.polar(torch.ones(5, 200).double(), 2 * torch.atan2(down, across)).mean().abs() < 4e-3
    )


@pytest.mark.parametrize("directions", [4, 8, "golden"])
def test_equal_steps_give_equal_turns(directions: int | str) -> None:
    angle = rotary(WIDE, directions=directions, coordinates="cells").angles(Places((5, 7)), 0)
    grid = angle.unflatten(2, (5, 7))
    for step in (grid.diff(dim=2), grid.diff(dim=3)):
        torch.testing.assert_close(step, step[:, :, :1, :1].expand_as(step), rtol=0, atol=4e-6)
    assert angle.shape == (1, 2 if directions == "golden" else 1, 35, 32)
    assert (angle - rotary(WIDE, coordinates="cells").angles(Places((5, 7)), 0)).abs().max() > 0.1
