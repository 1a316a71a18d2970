"""The decoder's positions follow a view's box in the position field."""

import torch

from pospre.nn.positions import decoder_positions
from pospre.nn.positions.sincos import sincos_positions

TABLE = sincos_positions(16, 4, 6)


def at_box(*box: float) -> torch.Tensor:
    positions = decoder_positions(TABLE, {"view/field_box": torch.tensor([[box]])}, (4, 6))
    assert positions.shape == (1, 24, 16)
    return positions[0]


def test_without_a_box_it_is_the_table() -> None:
    assert decoder_positions(TABLE, {}, (4, 6)) is TABLE


def test_the_whole_field_gives_the_table() -> None:
    torch.testing.assert_close(at_box(0.0, 0.0, 1.0, 1.0), TABLE)


def test_a_reversed_box_mirrors_the_columns() -> None:
    mirrored = TABLE.unflatten(0, (4, 6)).flip(1).flatten(0, 1)
    torch.testing.assert_close(at_box(1.0, 0.0, 0.0, 1.0), mirrored)


def test_half_the_field_is_a_finer_grid_over_it() -> None:
    half = at_box(0.0, 0.0, 0.5, 1.0).unflatten(0, (4, 6))
    whole = TABLE.unflatten(0, (4, 6))
    # the first two of six columns straddle the whole grid's first one, symmetrically
    q = 4
    middle = torch.atan2(half[0, :2, :q], half[0, :2, q : 2 * q])
    torch.testing.assert_close(middle.mean(0), torch.atan2(whole[0, 0, :q], whole[0, 0, q : 2 * q]))
    torch.testing.assert_close(half[:, 3, 2 * q :], whole[:, 3, 2 * q :])
