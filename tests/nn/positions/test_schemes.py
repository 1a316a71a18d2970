"""What all schemes of attention have in common: laws of their terms, and bad options."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pospre.nn.places import Places
from pospre.nn.positions import build_positions
from pospre.nn.positions.scheme import PositionTerms, Scheme, TransformerDims

GRID = (4, 6)
DIMS = TransformerDims(
    dim=64, num_heads=8, depth=2, grid=GRID, has_class_token=True, num_registers=1
)
PREFIX = DIMS.num_prefix
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov3": ("rotary", {}),
    "drawn": ("rotary", {"shift": 0.3, "jitter": 1.5, "rescale": 2.0}),
    "rope_vit": ("rotary", {"coordinates": "cells", "columns_first": True}),
    "eva_02": ("rotary", {"coordinates": "reference", "base": 10000.0}),
    "mixed": ("rotary_mixed", {}),
    "alibi": ("alibi", {}),
    "torus": ("torus", {}),
    "learned_slopes": ("torus", {"slopes": "learned"}),
    "lookhere": ("lookhere", {"fields": "eighths1-none"}),
}
SEEDS = st.integers(0, 2**32)
SIDES = st.integers(1, 7)


def scheme_of(kind: str) -> Scheme:
    name, options = KINDS[kind]
    scheme = build_positions({name: options}, DIMS)
    torch.manual_seed(0)
    scheme.reset_parameters()
    return scheme


def tensors(scheme: Scheme, places: Places) -> list[Tensor]:
    """Return rotations and biases of all blocks."""
    return [
        part.detach()
        for terms in scheme.layer_terms(places)
        for part in (*(terms.rotation or ()), terms.bias)
        if part is not None
    ]


def at_tokens(scheme: Scheme, places: Places, cells_RK: Tensor) -> list[Tensor]:
    """Return the terms of a whole grid, gathered at the prefix tokens and these cells."""
    prefix = torch.arange(PREFIX).expand(len(cells_RK), -1)
    index = torch.cat([prefix, cells_RK + PREFIX], 1)
    found = []
    for terms in scheme.layer_terms(places):
        for part in terms.rotation or ():
            found.append(_gathered(part.transpose(1, 2), index).transpose(1, 2))
        if terms.bias is not None:
            rows = _gathered(terms.bias.transpose(1, 2), index)  # B, queries, heads, keys
            found.append(_gathered(rows.transpose(1, 3), index).permute(0, 2, 3, 1))
    return found


def _gathered(part: Tensor, index_RK: Tensor) -> Tensor:
    """Return the entries of the second dimension at the indices of each row."""
    part = part.expand(len(index_RK), *part.shape[1:])
    return torch.stack([each[own] for each, own in zip(part, index_RK, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(rows=SIDES, cols=SIDES, seed=SEEDS)
def test_kept_patches_have_the_clues_that_they_have_in_the_whole(
    kind: str, rows: int, cols: int, seed: int
) -> None:
    draw, count = torch.Generator().manual_seed(seed), rows * cols
    kept = int(torch.randint(1, count + 1, (), generator=draw))
    cells = torch.stack([torch.randperm(count, generator=draw)[:kept] for _ in range(3)])
    keys = torch.randint(1 << 40, (3,), generator=draw)
    scheme = scheme_of(kind)
    whole = Places((rows, cols), keys=keys)
    found = tensors(scheme, Places((rows, cols), cells, keys=keys))
    torch.testing.assert_close(found, at_tokens(scheme, whole, cells), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_frame_as_a_box_is_no_box(kind: str) -> None:
    scheme, frame = scheme_of(kind), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    plain = tensors(scheme, Places(GRID))
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
    close(tensors(scheme, Places(GRID).within(frame)), plain)
    mirrored = torch.arange(24).view(GRID).flip(1).reshape(1, 24)
    close(
        tensors(scheme, Places(GRID).within(frame[:, [2, 1, 0, 3]])),
        tensors(scheme, Places(GRID, mirrored)),
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(top=st.integers(0, 2), left=st.integers(0, 3), seed=SEEDS)
def test_a_box_of_whole_cells_is_those_cells(kind: str, top: int, left: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows, cols = (int(torch.randint(1, n + 1, (), generator=draw)) for n in (4 - top, 6 - left))
    box = torch.tensor([[left / 6, top / 4, (left + cols) / 6, (top + rows) / 4]])
    cells = torch.arange(24).view(GRID)[top : top + rows, left : left + cols].reshape(1, -1)
    scheme = scheme_of(kind)
    torch.testing.assert_close(
        tensors(scheme, Places((rows, cols)).within(box)),
        tensors(scheme, Places(GRID, cells)),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, boxed=st.booleans())
def test_clues_of_forgotten_tokens_do_not_depend_on_their_cells(
    kind: str, seed: int, boxed: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.rand(3, 24, generator=draw) < 0.5
    hidden[:, 0] = True
    cells = torch.stack([torch.randperm(24, generator=draw) for _ in range(3)])
    moved = torch.where(hidden, torch.randint(24, (3, 24), generator=draw), cells)
    moved[:, 0] = (cells[:, 0] + 1) % 24
    box = torch.tensor([[0.1, 0.2, 0.6, 0.9]]).expand(3, -1) if boxed else None
    scheme = scheme_of(kind)
    places, other = (Places(GRID, at).within(box) for at in (cells, moved))
    assert not _same(tensors(scheme, places), tensors(scheme, other))
    forgotten = tensors(scheme, places.forget(hidden))
    assert _same(forgotten, tensors(scheme, other.forget(hidden)))
    for terms in scheme.layer_terms(places.forget(hidden)):
        _check_neutral(terms, hidden)


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def _check_neutral(terms: PositionTerms, hidden: Tensor) -> None:
    """Assert that prefix and hidden tokens have angle 0, or bias 0 from and to all others."""
    neutral = torch.nn.functional.pad(hidden, (PREFIX, 0), value=True)
    if terms.rotation is not None:
        cos, sin = (part.transpose(1, 2)[neutral] for part in terms.rotation)
        assert cos.eq(1).all() and sin.eq(0).all()
    if terms.bias is not None:
        assert terms.bias.transpose(1, 2)[neutral].eq(0).all()
        assert terms.bias.permute(0, 3, 1, 2)[neutral].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_made_on_the_meta_device_it_is_the_same(kind: str) -> None:
    name, options = KINDS[kind]
    with torch.device("meta"):
        scheme = build_positions({name: options}, DIMS)
        assert all(part.is_meta for part in tensors(scheme, Places(GRID)))
    scheme.to_empty(device="cpu")
    for part in (*scheme.parameters(), *scheme.buffers()):
        part.detach().fill_(torch.nan)
    torch.manual_seed(0)
    scheme.reset_parameters()
    assert _same(tensors(scheme, Places(GRID)), tensors(scheme_of(kind), Places(GRID)))
    learned = {"mixed": ["freqs"], "learned_slopes": ["slope"]}
    assert [*scheme.state_dict()] == learned.get(kind, [])


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_and_autocast_do_not_reach_angles_and_distances(kind: str) -> None:
    scheme, places = scheme_of(kind), Places((9, 12))
    plain = tensors(scheme, places)
    assert all(part.dtype is torch.float32 for part in plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert _same(tensors(scheme, places), plain)
    assert all(part.dtype is torch.float32 for part in tensors(scheme.bfloat16(), places))


@pytest.mark.parametrize("kind", ["drawn", "eva_02", "mixed", "torus", "lookhere"])
def test_one_graph_gives_the_same(kind: str) -> None:
    scheme = scheme_of(kind)

    def told(cells: Tensor, known: Tensor, keys: Tensor, box: Tensor | None) -> list[Tensor]:
        return [
            part
            for terms in scheme.layer_terms(Places(GRID, cells, None, known, keys).within(box))
            for part in (*(terms.rotation or ()), terms.bias)
            if part is not None
        ]

    cells = torch.stack([torch.randperm(24)[:9] for _ in range(2)])
    box = torch.tensor([[0.1, 0.2, 0.6, 0.9], [0.9, 0.0, 0.2, 1.0]])
    given = cells, torch.rand(2, 9) < 0.7, torch.tensor([3, 5]), None if kind == "drawn" else box
    torch._dynamo.reset()
    graph = torch.compile(told, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(*given), told(*given))
