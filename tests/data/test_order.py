"""The order of an epoch: a permutation, the same for all ranks, whose windows need few parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pospre import draws
from pospre.data.order import epoch_order

pytestmark = pytest.mark.science

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(sum)
SEEDS = st.integers(-(2**63), 2**64)


def ends_of(sizes):
    return np.cumsum(np.array(sizes, dtype=np.int64))


@given(seed=SEEDS, epoch=st.integers(0, 10**6), sizes=SIZES)
def test_random_order_is_that_of_the_draws(seed, epoch, sizes):
    order = epoch_order(seed, epoch, ends_of(sizes))
    assert order.dtype == np.int64
    assert np.array_equal(order, draws.order(seed, epoch, sum(sizes)))


def test_one_window_is_the_random_order():
    ends = ends_of([30, 0, 70, 11])
    assert np.array_equal(epoch_order(5, 2, ends, "windows", 111), epoch_order(5, 2, ends))


@pytest.mark.parametrize("order", ["random", "windows"])
def test_orders_differ_between_epochs_and_seeds(order):
    ends = np.arange(1, 101, dtype=np.int64) * 20
    orders = [
        epoch_order(seed, epoch, ends, order, 300) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (orders[first] == orders[second]).mean() < 0.01
        assert abs(np.corrcoef(orders[first], orders[second])[0, 1]) < 5 / np.sqrt(2000)


def test_every_sample_takes_every_place_equally():
    ends = ends_of([4, 4, 4, 4])
    num = 3000
    places = np.zeros((16, 16))
    for epoch in range(num):
        places[epoch_order(0, epoch, ends, "windows", 8), np.arange(16)] += 1
    chi_square = ((places - num / 16) ** 2 / (num / 16)).sum(axis=1)
    assert chi_square.max() < 15 + 6 * np.sqrt(2 * 15)


def test_blocks_change_no_order(monkeypatch):
    ends = ends_of([13] * 50)
    whole = epoch_order(1, 1, ends, "windows", 32)
    monkeypatch.setattr("pospre.data.order._BLOCK", 64)
    assert np.array_equal(epoch_order(1, 1, ends, "windows", 32), whole)
    monkeypatch.setattr("pospre.draws._ORDER_BLOCK", 7)
    assert np.array_equal(epoch_order(1, 1, ends), draws.order(1, 1, 650))


def test_golden_order_never_changes():
    assert epoch_order(0, 2, ends_of([3, 3, 3]), "windows", 4).tolist() == GOLDEN


GOLDEN = [7, 0, 8, 6, 4, 3, 2, 1, 5]
