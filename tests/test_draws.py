"""Counter-based draws: the same bits in every library, uniform, independent, order-free.

Chi-square limits are 5 standard deviations of draws with fixed seeds: nothing here is left to luck.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pospre import draws, portable_math

pytestmark = pytest.mark.science

WORDS = st.integers(-(2**63), 2**63 - 1)
SEEDS = st.integers(-(2**70), 2**70)
NUM = 20_000
MANY = 2**16
PURPOSES = ["crop", "shuffle/parts", "mask", "augment/noise"]
# What may differ between two draws: neighbours, and words whose bits are far apart.
OTHERS = [
    *({"seed": seed} for seed in (1, 2, -1, 2**32, 2**63)),
    *({"epoch": epoch} for epoch in (1, 2, -1, 2**32, 2**62)),
    *({"view": view} for view in (1, 2, 3, 100)),
    *({"shift": shift} for shift in (1, 2, 7, 1000, 2**32)),
    *({"purpose": purpose} for purpose in ("flip", "crop ", "augment/colour")),
    {"epoch": 1, "view": 1},
    {"seed": 1, "epoch": -1},
    {"epoch": 1, "shift": -1},
]


def keys(seed=0, epoch=0, view=0, purpose="crop", shift=0, num=NUM) -> np.ndarray:
    return draws.sample_keys(seed, epoch, np.arange(num) + shift, view, purpose)


def excess(counts: np.ndarray) -> float:
    """By how many standard deviations counts of equally likely cases exceed their chi-square."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


@given(
    seed=SEEDS,
    epoch=WORDS,
    index=st.lists(WORDS, min_size=1, max_size=8),
    view=WORDS,
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


@given(
    seed=SEEDS,
    epoch=WORDS,
    index=WORDS,
    first=st.integers(0, 2**62),
    count=st.integers(1, 4),
    purpose=st.text(max_size=20),
)
def test_numba_gives_the_same_bits(seed, epoch, index, first, count, purpose):
    start = draws.start_word(seed, purpose)
    compiled = portable_math.view_draws(start, epoch, index, (first, count), 40)
    views = first + np.arange(count)
    keys = draws.sample_keys(seed, epoch, np.array([[index]]), views, purpose)
    assert np.array_equal([compiled], draws.uniform(keys, 40))
    assert (compiled * 2**24 == np.floor(compiled * 2**24)).all()


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


@pytest.mark.parametrize("purpose", PURPOSES)
def test_uniform_draws_are_uniform(purpose):
    table = keys(purpose=purpose, num=MANY)
    for values in draws.uniform(table, 4).T:
        assert values.min() >= 0 and values.max() < 1
        assert excess(np.histogram(values, bins=256, range=(0, 1))[0]) < 5
        assert abs(values.mean() - 0.5) < 5 / math.sqrt(12 * MANY)
        low_bits = (values * 2**24).astype(np.int64) & 255
        assert excess(np.bincount(low_bits, minlength=256)) < 5
    words = draws.bits(table, 1)[:, 0].view(np.uint64)
    for shift in range(0, 64, 8):
        part = (words >> np.uint64(shift)) & np.uint64(255)
        assert excess(np.bincount(part.astype(np.int64), minlength=256)) < 5


@pytest.mark.parametrize("word", ["seed", "epoch", "view"])
def test_draws_are_uniform_along_every_word(word):
    """Sample indices are counted up in the other tests; here it is another word."""
    one = np.zeros(1, np.int64)
    if word == "seed":
        table = np.concatenate(
            [draws.sample_keys(seed, 0, one, 0, "crop") for seed in range(-4096, 4096)]
        )
    else:
        words = {"epoch": one, "view": one} | {word: np.arange(-MANY, MANY)}
        table = draws.sample_keys(0, words["epoch"], one, words["view"], "crop")
    values = draws.uniform(table, 2)
    for column in values.T:
        assert excess(np.histogram(column, bins=64, range=(0, 1))[0]) < 5
    pairs = np.histogram2d(values[:-1, 0], values[1:, 0], bins=16, range=[(0, 1), (0, 1)])[0]
    assert excess(pairs) < 5


@pytest.mark.parametrize("word", [*range(0, 63, 9), 63])
def test_one_bit_of_a_word_changes_every_bit_with_probability_half(word):
    """The avalanche of the finaliser, from small numbers as from large ones."""
    flipped = np.int64(draws._signed(1 << word))
    limit = 5 * 0.5 / math.sqrt(2 * NUM) + 0.005
    for words in (np.arange(2 * NUM), draws.bits(keys(), 2).ravel()):
        change = (portable_math.mix(words) ^ portable_math.mix(words ^ flipped)).view(np.uint64)
        bits = (change[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
        assert np.abs(bits.mean(axis=0) - 0.5).max() < limit


def test_every_bit_is_a_fair_coin():
    words = draws.bits(keys(), 1)[:, 0].view(np.uint64)
    ones = ((words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(NUM)


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_draws_of_other_words_are_independent(other):
    first = draws.uniform(keys(num=MANY), 2)
    second = draws.uniform(keys(**other, num=MANY), 2)
    for one, two in ((0, 0), (1, 1), (0, 1), (1, 0)):
        columns = first[:, one], second[:, two]
        assert abs(correlation(*columns)) < 5 / math.sqrt(MANY)
        assert excess(np.histogram2d(*columns, bins=32, range=[(0, 1), (0, 1)])[0]) < 5
    equal = (draws.bits(keys(), 1) ^ draws.bits(keys(**other), 1)).view(np.uint64)
    ones = ((equal >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(NUM)


def test_the_draws_of_a_sample_are_independent():
    values = draws.uniform(keys(num=MANY), 40)
    off_diagonal = np.corrcoef(values.T)[~np.eye(40, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / math.sqrt(MANY)
    for first in range(0, 40, 3):
        pair = values[:, first], values[:, (first * 7 + 1) % 40]
        assert excess(np.histogram2d(*pair, bins=32, range=[(0, 1), (0, 1)])[0]) < 5


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
    samples = np.array([-5, 2**50])
    far = draws.bits(draws.sample_keys(-3, 2**40 + 7, samples, 3, "augment/noise"), 2)
    assert far.tolist() == GOLDEN_FAR
    assert draws.order(0, 0, 8).tolist() == GOLDEN_ORDER


def test_torch_compile_takes_purposes_as_constants():
    """The mark is set without torch's decorator, which would import the compiler."""
    assert vars(draws._purpose_word) == vars(torch.compiler.assume_constant_result(lambda: 0))


GOLDEN = [[-2972431915371398239, -959527570053836610], [-941855199011157468, -5592864970392643381]]
GOLDEN_FAR = [
    [-2019555276945942857, 3520193824885500426],
    [3172756036054320411, -419335125853847441],
]
GOLDEN_ORDER = [3, 1, 0, 2, 6, 4, 5, 7]
