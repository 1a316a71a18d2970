"""Relative positions: timm's bias, some cells of it, and what is forgotten."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import RelPosBias
from torch import Tensor

from pospre.nn.build import build_encoder
from pospre.nn.places import Places
from pospre.nn.positions.relative import Relative, SharedRelative
from pospre.nn.positions.scheme import TransformerDims
from pospre.nn.vit import Encoder, as_vit

KINDS = ["relative", "shared_relative"]


def scheme(grid: tuple[int, int], prefix: int) -> SharedRelative:
    """Return a scheme with random biases; the class token is the first of the prefix."""
    made = SharedRelative(TransformerDims(8, 2, 3, grid, prefix > 0, max(prefix - 1, 0)))
    torch.nn.init.normal_(made.table)
    return made


def biases(made: Relative | SharedRelative, places: Places) -> list[Tensor]:
    """Return the bias of every block."""
    found = [terms.bias for terms in made.layer_terms(places)]
    assert len(found) == made.dims.depth
    return [each for each in found if each is not None]


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(4, 4), (2, 5)])
def test_a_whole_image_has_timms_bias(grid: tuple[int, int], prefix: int) -> None:
    ours = scheme(grid, prefix)
    theirs = RelPosBias(grid, num_heads=2, prefix_tokens=prefix)
    theirs.load_state_dict({"relative_position_bias_table": ours.table}, strict=False)
    for bias in biases(ours, Places(grid)):
        assert torch.equal(bias, theirs.get_bias())


@settings(max_examples=25)
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    prefix=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_some_tokens_have_the_rows_and_columns_of_all(
    grid: tuple[int, int], prefix: int, seed: int
) -> None:
    made, generator = scheme(grid, prefix), torch.Generator().manual_seed(seed)
    whole, count = biases(made, Places(grid))[0][0], grid[0] * grid[1]
    cells = torch.rand(3, count, generator=generator).argsort(1)[:, : 1 + count // 2]
    some = biases(made, Places(grid, cells))[0]
    for row in range(3):
        kept = torch.cat([torch.arange(prefix), cells[row] + prefix])
        assert torch.equal(some[row], whole[:, kept][:, :, kept])


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_forgotten_tokens_have_no_bias_and_the_others_keep_theirs(prefix: int) -> None:
    made = scheme((3, 3), prefix)
    hidden = torch.rand(4, 9) < 0.5
    whole = biases(made, Places((3, 3)))[0]
    some = biases(made, Places((3, 3)).forget(hidden))[0]
    told = torch.cat([torch.ones(4, prefix, dtype=torch.bool), ~hidden], dim=1)
    pairs = told[:, None, :, None] & told[:, None, None, :]
    assert torch.equal(some, torch.where(pairs, whole, 0.0))
    nothing = biases(made, Places((3, 3)).forget(torch.ones(4, 9, dtype=torch.bool)))[0]
    assert not nothing[:, :, prefix:].any() and not nothing[..., prefix:].any()
    assert prefix == 0 or nothing[:, :, :prefix, :prefix].any()


def test_every_block_has_its_own_biases_at_offsets_that_are_found_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Relative(TransformerDims(8, 2, 3, (3, 3), True))
    for table in made.tables:
        torch.nn.init.normal_(table)
    found, index = [], Relative.index

    def noted(*given: Any) -> Tensor:
        found.append(index(*given))
        return found[-1]

    monkeypatch.setattr(Relative, "index", noted)
    for bias, table in zip(biases(made, Places((3, 3))), made.tables, strict=True):
        assert torch.equal(bias, table[found[0]].permute(0, 3, 1, 2))
    assert len(found) == 1


def test_all_blocks_share_one_bias() -> None:
    shared = biases(scheme((2, 2), 0), Places((2, 2)))
    assert shared[0] is shared[1] is shared[2]


def encoder(kind: str) -> Encoder:
    torch.manual_seed(0)
    made = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, positions=kind)
    return as_vit(made.eval())


def drawn(kind: str) -> Encoder:
    made = encoder(kind)
    for table in made.positions.parameters():
        torch.nn.init.normal_(table)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_they_begin_at_zero_and_tell_places_apart(kind: str) -> None:
    ours, bare = encoder(kind).double(), encoder("none").double()
    bare.load_state_dict(ours.state_dict(), strict=False)
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(images), bare(images), atol=1e-12, rtol=0)
    ours, images = drawn(kind), images.float()
    assert {(*table.shape,) for table in ours.positions.parameters()} == {((2 * 4 - 1) ** 2 + 3, 3)}
    flipped = torch.cat([images[..., 16:], images[..., :16]], dim=-1)
    assert not torch.allclose(ours(images)[:, 0], ours(flipped)[:, 0], atol=1e-4)
