"""Cross masks against the loop of the specification."""

import pytest
import torch

from pospre import draws
from pospre.algorithms.masked_position.masks import cross_order


def keys(count):
    return draws.sample_keys(0, 0, torch.arange(count), 0, "test")


def centres(key, grid):
    number = 8 * max(grid)
    draw = draws.uniform(key, 2 * number)
    return zip((draw[:number] * grid[0]).long(), (draw[number:] * grid[1]).long(), strict=True)


@pytest.mark.parametrize("grid", [(14, 14), (3, 5)])
def test_any_start_is_a_mask_grown_cross_by_cross(grid):
    rows, cols = grid
    orders = cross_order(keys(12), grid)
    for key, order in zip(keys(12), orders.tolist(), strict=True):
        assert sorted(order) == list(range(rows * cols))
        for count in (1, rows * cols // 3, rows * cols // 2):
            masked: set[int] = set()
            for row, col in centres(key, grid):
                cross = {row * cols + c for c in range(cols)} | {
                    r * cols + col for r in range(rows)
                }
                left = {int(cell) for cell in cross} - masked
                if len(masked) + len(left) >= count:
                    break
                masked |= left
            mask = set(order[:count])
            assert masked <= mask and mask - masked <= left

            def distance(cell: int, row: int = int(row), col: int = int(col)) -> int:
                return abs(cell // cols - row) + abs(cell % cols - col)

            taken = [distance(cell) for cell in mask - masked]
            others = [distance(cell) for cell in left - mask]
            assert not taken or not others or max(taken) <= min(others)


def test_one_cross_covers_27_of_196():
    order = cross_order(keys(1), (14, 14))[0, :27]
    rows, cols = (order // 14).bincount(minlength=14), (order % 14).bincount(minlength=14)
    assert sorted(rows.tolist()) == sorted(cols.tolist()) == [1] * 13 + [14]


def test_ties_are_broken_at_random():
    order = cross_order(keys(4000), (4, 4))
    masked = torch.zeros(4000, 16).scatter(1, order[:, :6], 1.0).mean(0).view(4, 4)
    for image in (masked.T, masked.flip(0), masked.flip(1)):
        torch.testing.assert_close(image, masked, rtol=0, atol=0.04)
    # of the four neighbours of a centre (tie at distance 1) each is taken second equally often
    first, second = order[:, 0], order[:, 1]
    inner = torch.isin(first, torch.tensor([5, 6, 9, 10]))
    for step in (-4, -1, 1, 4):
        share = ((second - first)[inner] == step).float().mean()
        assert share == pytest.approx(0.25, abs=0.06)
