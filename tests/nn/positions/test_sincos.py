"""Sin-cos positions: the goldens of MAE's table, waves between its cells, and that none learn."""

import math

import pytest
import torch
from timm.layers import build_sincos2d_pos_embed

from pospre.nn.build import build_encoder
from pospre.nn.places import Places
from pospre.nn.positions import decoder_positions
from pospre.nn.positions.scheme import Scheme, TransformerDims
from pospre.nn.positions.sincos import (
    SinCos,
    is_sincos,
    sincos_positions,
    sincos_positions_1d,
    sincos_table,
)


@pytest.fixture(scope="module")
def table():
    return sincos_positions(768, 14, 14)


def test_rows_have_the_golden_values(table):
    torch.testing.assert_close(table.square().sum(1), torch.full((196,), 384.0))
    blocks = table[0].view(4, 192)
    assert (blocks[[0, 2]] == 0).all() and (blocks[[1, 3]] == 1).all()
    assert table[1, 0].item() == pytest.approx(0.841471, abs=1e-6)
    assert table[1, 192].item() == pytest.approx(0.540302, abs=1e-6)
    assert table[14, 384].item() == pytest.approx(0.841471, abs=1e-6)
    assert table.double().sum().item() == pytest.approx(69594.4939, abs=1e-2)


def test_differs_from_timm_only_in_the_order_of_blocks(table):
    theirs = build_sincos2d_pos_embed([14, 14], 768).view(196, 4, 192)
    ours = theirs[:, [1, 3, 0, 2]].flatten(1)
    torch.testing.assert_close(table, ours, atol=1e-5, rtol=0)


def test_rectangular_grid_has_the_column_first():
    table = sincos_positions(8, 2, 3)
    assert table.shape == (6, 8)
    torch.testing.assert_close(table[4, 0], torch.tensor(1.0).sin())  # row 1, column 1
    torch.testing.assert_close(table[2, 0], torch.tensor(2.0).sin())  # row 0, column 2
    torch.testing.assert_close(table[3, :2], torch.zeros(2))  # row 1, column 0


def test_sequence_has_the_sinusoids_of_the_transformer():
    table = sincos_positions_1d(32, 100)
    assert table.shape == (100, 32)
    torch.testing.assert_close(table.square().sum(1), torch.full((100,), 16.0))
    assert table[7, 0].item() == pytest.approx(math.sin(7), abs=1e-6)
    assert table[7, 5].item() == pytest.approx(math.cos(7 / 10000 ** (4 / 32)), abs=1e-6)
    assert torch.equal(sincos_table(32, 100, 1), table)
    assert torch.equal(sincos_table(32, 5, 20), sincos_positions(32, 5, 20))


@pytest.fixture(params=["encoder", "decoder"])
def scheme(request: pytest.FixtureRequest) -> Scheme:
    """Return the fixed table of 4 by 6 cells of an encoder, or of a decoder behind one."""
    encoder = SinCos(TransformerDims(16, 2, 1, (4, 6)))
    encoder.reset_parameters()
    if request.param == "encoder":
        return encoder
    found = decoder_positions(encoder, TransformerDims(16, 2, 1, (4, 6)))
    assert not found.state_dict() and not [*found.parameters()]
    return found


def at_box(scheme: Scheme, *box: float) -> torch.Tensor:
    vectors = scheme.embed(Places((4, 6)).within(torch.tensor([[*box]])))
    assert vectors is not None and vectors.shape == (1, 24, 16)
    return vectors[0]


def test_a_box_has_the_waves_at_the_centres_of_its_cells(scheme: Scheme) -> None:
    table = sincos_positions(16, 4, 6)
    whole = scheme.embed(Places((4, 6)))
    assert whole is not None and torch.equal(whole[0], table)
    torch.testing.assert_close(at_box(scheme, 0.0, 0.0, 1.0, 1.0), table)
    mirrored = table.unflatten(0, (4, 6)).flip(1).flatten(0, 1)
    torch.testing.assert_close(at_box(scheme, 1.0, 0.0, 0.0, 1.0), mirrored)
    # of the left half the first two of six columns straddle the whole grid's first one
    half = at_box(scheme, 0.0, 0.0, 0.5, 1.0).unflatten(0, (4, 6))
    cells, q = table.unflatten(0, (4, 6)), 4
    middle = torch.atan2(half[0, :2, :q], half[0, :2, q : 2 * q])
    torch.testing.assert_close(middle.mean(0), torch.atan2(cells[0, 0, :q], cells[0, 0, q : 2 * q]))
    torch.testing.assert_close(half[:, 3, 2 * q :], cells[:, 3, 2 * q :])


def test_a_box_of_a_sequence_has_the_sequences_waves() -> None:
    scheme = SinCos(TransformerDims(16, 2, 1, (6, 1)))
    scheme.reset_parameters()
    vectors = scheme.in_boxes(torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.5, 1.0, 1.0]]), (6, 1))
    table = sincos_positions_1d(16, 6)
    torch.testing.assert_close(vectors[0], table)
    # the last half's first two tokens lie around the fourth
    middle = torch.atan2(vectors[1, :2, ::2], vectors[1, :2, 1::2]).mean(0)
    torch.testing.assert_close(middle[1:], torch.atan2(table[3, 2::2], table[3, 3::2]))


def test_is_sincos_knows_the_table_in_any_precision() -> None:
    table = sincos_positions(64, 4, 4)
    assert is_sincos(table, 4, 4) and is_sincos(table.bfloat16(), 4, 4)
    assert not is_sincos(table + 0.01, 4, 4) and not is_sincos(table, 2, 8)


def test_they_do_not_learn_where_all_is_thawed() -> None:
    encoder = build_encoder("vit_tiny16", image_size=32, depth=1)
    encoder.requires_grad_(False).requires_grad_(True)
    encoder(torch.randn(1, 3, 32, 32)).square().sum().backward()
    still = {name for name, one in encoder.named_parameters() if one.grad is None}
    assert still == {"positions.pos_embed"}


def test_those_that_learn_start_as_the_fixed_table_and_move() -> None:
    options = {"image_size": 32, "patch_size": 8, "depth": 1, "num_registers": 2}
    fixed = build_encoder("vit_tiny16", **options)  # type: ignore[arg-type]
    encoder = build_encoder("vit_tiny16", positions="learned_sincos", **options)  # type: ignore[arg-type]
    table, still = (each.get_parameter("positions.pos_embed") for each in (encoder, fixed))
    assert not still.requires_grad and torch.equal(table, still)
    encoder(torch.randn(2, 3, 32, 32)).square().mean().backward()
    torch.optim.SGD([table], lr=1.0).step()
    moved = (table - still).any(-1)[0]
    assert moved.tolist() == [True, False, False, *[True] * 16]  # all but the registers' rows
