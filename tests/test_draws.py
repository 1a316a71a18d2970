"""Counter-based draws: the same bits in numpy and torch, uniform, independent, order-free."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pospre import draws

WORDS = st.integers(0, 2**63 - 1)
NUM = 20_000


def keys(seed: int = 0, epoch: int = 0, view: int = 0, purpose: str = "crop") -> np.ndarray:
    return draws.sample_keys(seed, epoch, np.arange(NUM), view, purpose)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


@given(
    seed=WORDS,
    epoch=WORDS,
    index=st.lists(WORDS, min_size=1, max_size=8),
    view=st.integers(0, 100),
    purpose=st.text(max_size=20),
    count=st.integers(1, 50),
)
def test_numpy_and_torch_give_the_same_bits(seed, epoch, index, view, purpose, count):
    samples = np.array(index, dtype=np.int64)
    ours = draws.sample_keys(seed, epoch, samples, view, purpose)
    theirs = draws.sample_keys(seed, epoch, torch.from_numpy(samples), view, purpose)
    assert ours.dtype == np.int64 and theirs.dtype == torch.int64
    assert np.array_equal(ours, theirs.numpy())
    for draw in (draws.bits, draws.uniform, draws.permutation):
        first, second = draw(ours, count), draw(theirs, count).numpy()
        assert first.dtype == second.dtype and first.shape == (len(index), count)
        assert np.array_equal(first, second)


@given(count=st.integers(1, 40), rows=st.integers(1, 6), columns=st.integers(1, 3))
def test_one_draw_depends_on_its_own_key_and_counter_only(count, rows, columns):
    samples = np.arange(rows * columns).reshape(rows, columns)
    table = draws.sample_keys(3, 1, samples, 0, "crop")
    all_at_once = draws.uniform(table, count)
    assert all_at_once.shape == (rows, columns, count)
    alone = draws.uniform(draws.sample_keys(3, 1, samples[-1:, -1], 0, "crop"), count + 5)
    assert np.array_equal(all_at_once[-1, -1], alone[0, :count])


def test_an_epoch_per_sample_equals_one_epoch_for_all():
    samples = torch.arange(6)
    one = draws.sample_keys(0, 7, samples, 0, "crop")
    each = draws.sample_keys(0, torch.full_like(samples, 7), samples, 0, "crop")
    assert torch.equal(one, each)


def test_keys_differ_in_every_word():
    everything = np.concatenate(
        [
            keys(),
            keys(seed=1),
            keys(epoch=1),
            keys(view=1),
            keys(purpose="flip"),
            draws.sample_keys(0, 0, -np.arange(1, NUM), 0, "crop"),
        ]
    )
    assert len(np.unique(everything)) == len(everything)


def test_uniform_draws_are_uniform():
    values = draws.uniform(keys(), 4)
    assert values.min() >= 0 and values.max() < 1
    for column in values.T:
        counts, _ = np.histogram(column, bins=64, range=(0, 1))
        chi_square = float(((counts - NUM / 64) ** 2 / (NUM / 64)).sum())
        assert abs(chi_square - 63) < 5 * math.sqrt(2 * 63)
        assert abs(column.mean() - 0.5) < 5 / math.sqrt(12 * NUM)


def test_every_bit_is_a_fair_coin():
    words = draws.bits(keys(), 1)[:, 0].view(np.uint64)
    ones = ((words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(NUM)


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"epoch": 1}, {"view": 1}, {"purpose": "flip"}, {"epoch": 1, "view": 1}],
)
def test_draws_of_other_words_are_independent(other):
    first, second = draws.uniform(keys(), 2), draws.uniform(keys(**other), 2)
    limit = 5 / math.sqrt(NUM)
    assert abs(correlation(first[:, 0], second[:, 0])) < limit
    assert abs(correlation(first[:, 1], second[:, 1])) < limit


def test_neighbouring_samples_and_counters_are_independent():
    values = draws.uniform(keys(), 2)
    limit = 5 / math.sqrt(NUM)
    assert abs(correlation(values[:-1, 0], values[1:, 0])) < limit
    assert abs(correlation(values[:, 0], values[:, 1])) < limit
    # One sample's next counter is no other sample's draw.
    assert not np.intersect1d(draws.bits(keys(), 2)[:, 0], draws.bits(keys(), 2)[:, 1]).size


@given(seed=WORDS, count=st.integers(1, 200))
def test_a_permutation_holds_every_number_once(seed, count):
    table = draws.permutation(draws.sample_keys(seed, 0, np.arange(3), 0, "mae/mask"), count)
    assert np.array_equal(np.sort(table, axis=-1), np.tile(np.arange(count), (3, 1)))


def test_every_number_visits_every_place_equally():
    count = 7
    table = draws.permutation(keys(purpose="mae/mask"), count)
    for number in range(count):
        places = np.bincount(np.argmax(table == number, axis=1), minlength=count)
        expected = NUM / count
        chi_square = float(((places - expected) ** 2 / expected).sum())
        assert chi_square < (count - 1) + 6 * math.sqrt(2 * (count - 1))


def test_normal_draws_are_standard_normal_and_independent():
    table = draws.normal(keys(), 5)
    assert table.shape == (NUM, 5) and table.dtype == np.float32
    flat = np.sort(table.ravel().astype(np.float64))
    cumulative = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in flat[::50]])
    ranks = np.arange(len(flat))[::50] / len(flat)
    assert np.abs(cumulative - ranks).max() < 1.95 / math.sqrt(len(flat))  # Kolmogorov-Smirnov
    off_diagonal = np.corrcoef(table.T)[~np.eye(5, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / math.sqrt(NUM)
    assert abs(correlation(table[:, 0] ** 2, table[:, 1] ** 2)) < 5 / math.sqrt(NUM)


def test_normal_draws_agree_between_numpy_and_torch():
    words = keys()[:100]
    torch_table = draws.normal(torch.from_numpy(words), 7)
    assert torch_table.dtype == torch.float32
    np.testing.assert_allclose(torch_table.numpy(), draws.normal(words, 7), atol=1e-5)


def test_the_order_is_a_permutation_that_changes_with_seed_and_epoch():
    orders = [draws.order(seed, epoch, 500) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(500))
    assert np.array_equal(orders[0], draws.order(0, 0, 500))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (orders[first] == orders[second]).mean() < 0.05
    assert abs(correlation(orders[0], np.arange(500))) < 5 / math.sqrt(500)


def test_golden_words_never_change():
    """A change here would change every published run."""
    golden = draws.bits(draws.sample_keys(0, 0, np.array([0, 1]), 0, "crop"), 2)
    assert golden.tolist() == GOLDEN
    assert draws.order(0, 0, 8).tolist() == GOLDEN_ORDER


GOLDEN = [
    [-2972431915371398239, -959527570053836610],
    [-941855199011157468, -5592864970392643381],
]
GOLDEN_ORDER = [3, 1, 0, 2, 6, 4, 5, 7]
