"""The goldens of MAE's sin-cos table (spec: shared machinery)."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed, resample_abs_pos_embed

from pospre.errors import UserError
from pospre.nn.positions.sincos import sincos_positions, sincos_positions_1d, sincos_table
from pospre.nn.positions.table import Resampling, resample_positions


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
    with pytest.raises(UserError, match=r"even width, not 33"):
        sincos_positions_1d(33, 4)


@pytest.mark.parametrize("new", [(16, 16), (17, 23), (37, 40), (50, 9)])
def test_a_table_is_resampled_as_each_family_does(new: tuple[int, int]) -> None:
    table = torch.randn(37 * 37, 24, generator=torch.Generator().manual_seed(0))
    picture = table.view(1, 37, 37, 24).permute(0, 3, 1, 2)
    dino = [(count + 0.1) / 37 for count in new]
    published: dict[Resampling, torch.Tensor] = {
        "bicubic": F.interpolate(picture, new, mode="bicubic"),
        "offset": F.interpolate(picture, scale_factor=dino, mode="bicubic"),
        "antialiased": resample_abs_pos_embed(
            table[None], [*new], [37, 37], num_prefix_tokens=0
        ).permute(0, 2, 1),
    }
    for how, theirs in published.items():
        ours = resample_positions(table, (37, 37), new, how)
        torch.testing.assert_close(ours, theirs.flatten(2)[0].T, atol=1e-4, rtol=0)
    assert torch.equal(resample_positions(table, (37, 37), (37, 37), "offset"), table)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = resample_positions(table, (37, 37), new)
    assert torch.equal(mixed, resample_positions(table, (37, 37), new))


def test_width_must_be_a_multiple_of_four():
    with pytest.raises(UserError, match="30"):
        sincos_positions(30, 2, 2)
