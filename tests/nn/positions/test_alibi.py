"""Distances as a bias: golden numbers, slopes, the torus, and that one bias serves all rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.nn.build import build_encoder
from pospre.nn.places import Places
from pospre.nn.positions.alibi import Alibi, Slopes, Torus, head_slopes
from pospre.nn.positions.scheme import TransformerDims
from tests.nn.positions.golden import GRID, PLACES, check

DIMS = TransformerDims(dim=16, num_heads=2, depth=2, grid=GRID)


def alibi(dims: TransformerDims = DIMS, kind: type[Alibi] = Alibi, **options: Slopes) -> Alibi:
    scheme = kind(dims, **options)
    scheme.reset_parameters()
    return scheme


def distances(scheme: Alibi, places: Places = PLACES) -> Tensor:
    return scheme.distances(places, 0)[0]


def test_slopes() -> None:
    assert head_slopes(2) == [1 / 16, 1 / 256]
    assert head_slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    check(torch.tensor(head_slopes(12))[-4:], ".7071 .3536 .1768 .0884", places=4)
    assert head_slopes(8) == [2.0**-i for i in range(1, 9)]


def test_in_cells() -> None:
    bias = distances(alibi())
    check(
        bias[0, 5],
        "-.088388 -.0625 -.088388 -.139754 -.0625 0 -.0625 -.125 -.088388 -.0625 -.088388 -.139754",
    )
    torch.testing.assert_close(bias[1], bias[0] / 16)


def test_on_a_torus() -> None:
    bias = distances(alibi(kind=Torus))
    rows = (
        "0 -.447214 -.894427 -.447214",
        "-.447214 -.632456 -1 -.632456",
        "-.447214 -.632456 -1 -.632456",
    )
    check(bias[0, 0], " ".join(rows))
    assert torch.equal(bias[0], bias[1])
    # all cells are equal: every row holds the same distances
    torch.testing.assert_close(bias.sort(-1).values, bias[:, :1].sort(-1).values.expand_as(bias))
    plain = distances(alibi())
    assert (plain.sort(-1).values - plain[:, :1].sort(-1).values).abs().max() > 0.05


@pytest.mark.parametrize("kind", [Alibi, Torus])
@pytest.mark.parametrize("grid", [(5, 2), (1, 7), (1, 1)])
def test_at_another_grid(kind: type[Alibi], grid: tuple[int, int]) -> None:
    bias = distances(alibi(kind=kind), Places(grid))
    rows, cols = grid
    for one in range(rows * cols):
        for other in range(rows * cols):
            down, across = abs(one // cols - other // cols), abs(one % cols - other % cols)
            if kind is Torus:
                down, across = min(down, rows - down), min(across, cols - across)
            found = float(bias[0, one, other])
            scale = 1 / 16
            if kind is Torus:
                scale = 1 / max(((rows // 2) ** 2 + (cols // 2) ** 2) ** 0.5, 1)
            assert found == pytest.approx(-scale * (down**2 + across**2) ** 0.5, abs=1e-6)


def test_places_alike_for_all_rows_cost_one_bias() -> None:
    dims = DIMS._replace(has_class_token=True, num_registers=2)
    layer_terms = [*alibi(dims).layer_terms(PLACES)]
    assert layer_terms[0].bias is not None and layer_terms[0].bias is layer_terms[1].bias
    assert layer_terms[0].bias.shape == (1, 2, 15, 15)
    assert (
        layer_terms[0].bias[:, :, :3].eq(0).all() and layer_terms[0].bias[:, :, :, :3].eq(0).all()
    )
    assert layer_terms[0].rotation is None


def test_a_decoder_has_slopes_of_its_heads() -> None:
    other = alibi(kind=Torus).companion(DIMS._replace(num_heads=4))
    assert isinstance(other, Torus)
    plain = alibi().companion(DIMS._replace(num_heads=4))
    assert isinstance(plain, Alibi)
    plain.reset_parameters()
    assert plain.slope.tolist() == [head_slopes(4)]


@pytest.mark.parametrize("kind", [Alibi, Torus])
def test_slopes_by_name(kind: type[Alibi]) -> None:
    plain = distances(alibi(kind=kind, slopes="constant"))
    slopes = torch.tensor(head_slopes(2))[:, None, None]
    fixed = distances(alibi(kind=kind, slopes="fixed"))
    torch.testing.assert_close(fixed, slopes * plain)
    usual = distances(alibi(kind=kind))
    assert torch.equal(usual, plain if kind is Torus else fixed)


def test_every_head_of_every_block_learns_a_slope() -> None:
    scheme = alibi(slopes="learned")
    slopes = scheme.get_parameter("slope")
    assert slopes.shape == (2, 2) and 0 < slopes.min() < slopes.max() < 1
    plain = distances(alibi(slopes="constant"))
    for layer, terms in enumerate(scheme.layer_terms(PLACES)):
        assert terms.bias is not None
        torch.testing.assert_close(terms.bias[0], slopes[layer, :, None, None] * plain)
    positions: Any = {"alibi": {"slopes": "learned"}}
    encoder = build_encoder("vit_tiny16", image_size=64, depth=2, positions=positions)
    encoder(torch.randn(1, 3, 64, 64)).square().sum().backward()
    gradient = encoder.get_parameter("positions.slope").grad
    assert gradient is not None and gradient.ne(0).all()
    other = scheme.companion(DIMS._replace(num_heads=4, depth=1))
    assert other is not None and other.get_parameter("slope").shape == (1, 4)
