"""Shard groups: the order of an epoch for machines that fetch their own parts."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pospre import draws
from pospre.data.order import batch_rows, deal, epoch_order, groups_of, rank_visits
from pospre.errors import UserError
from tests.data.loading import joined, loader, same

pytestmark = pytest.mark.science

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(sum)
GROUPS = st.integers(1, 8)
SEEDS = st.integers(-(2**63), 2**64)
ORDERS = st.sampled_from(["random", "windows"])


def ends_of(sizes: list[int]) -> np.ndarray:
    return np.cumsum(np.array(sizes, dtype=np.int64))


def group_of(seed: int, ends: np.ndarray, shard_groups: int) -> np.ndarray:
    """Return the shard group of every sample."""
    group = np.full(ends[-1], -1)
    for number, _, first, size in zip(*deal(seed, ends, shard_groups), strict=True):
        assert (group[first : first + size] == -1).all()
        group[first : first + size] = number
    return group


@given(seed=SEEDS, sizes=SIZES, shard_groups=GROUPS)
def test_the_deal_is_even_and_cuts_few_parts(
    seed: int, sizes: list[int], shard_groups: int
) -> None:
    ends = ends_of(sizes)
    runs = deal(seed, ends, shard_groups)
    counts = np.bincount(group_of(seed, ends, shard_groups), minlength=shard_groups)
    assert counts.sum() == ends[-1] and np.ptp(counts) <= 1 and (np.diff(counts) <= 0).all()
    assert len(runs.part) <= np.count_nonzero(sizes) + shard_groups - 1
    of_part = np.searchsorted(ends, runs.first, side="right")
    assert np.array_equal(of_part, runs.part) and (np.diff(runs.group) >= 0).all()


@given(
    seed=SEEDS,
    epoch=st.integers(0, 10**6),
    sizes=SIZES,
    window=st.integers(1, 900),
    shard_groups=GROUPS,
    order=ORDERS,
)
def test_an_epoch_visits_every_sample_once_and_the_groups_in_turn(
    seed: int, epoch: int, sizes: list[int], window: int, shard_groups: int, order: str
) -> None:
    assume(window >= shard_groups)
    ends = ends_of(sizes)
    visits = epoch_order(seed, epoch, ends, order, window, shard_groups)
    assert visits.dtype == np.int64
    assert np.array_equal(np.sort(visits), np.arange(ends[-1]))
    assert np.array_equal(visits, epoch_order(seed, epoch, ends, order, window, shard_groups))
    assert np.array_equal(
        group_of(seed, ends, shard_groups)[visits], np.arange(ends[-1]) % shard_groups
    )


@given(seed=SEEDS, sizes=SIZES, window=st.integers(1, 90), shard_groups=GROUPS)
def test_a_group_is_shuffled_in_windows_of_its_parts(
    seed: int, sizes: list[int], window: int, shard_groups: int
) -> None:
    assume(window >= shard_groups)
    ends = ends_of(sizes)
    visits = epoch_order(seed, 1, ends, "windows", window, shard_groups)
    sequence = epoch_order(seed, 1, ends, "windows", shard_groups, shard_groups)  # windows of 1
    for group in range(shard_groups):
        own, parts = visits[group::shard_groups], sequence[group::shard_groups]
        for start in range(0, len(own), window // shard_groups):
            piece = slice(start, start + window // shard_groups)
            keys = draws.sample_keys(seed, 1, own[piece], 0, "shuffle")
            assert set(own[piece]) == set(parts[piece]) and (keys[1:] > keys[:-1]).all()
        of = np.searchsorted(ends, parts, side="right")  # every part comes in one piece
        assert np.count_nonzero(of[1:] != of[:-1]) == max(0, len(set(of)) - 1)
        assert (np.diff(parts)[of[1:] == of[:-1]] == 1).all()  # and in its own order


@given(
    sizes=SIZES,
    shard_groups=GROUPS,
    multiple=st.integers(1, 3),
    world=st.integers(1, 8),
    done=st.integers(0, 3),
)
def test_ranks_share_the_same_batches_however_many_they_are(
    sizes: list[int], shard_groups: int, multiple: int, world: int, done: int
) -> None:
    """Also from the middle of an epoch on: ``done`` batches were trained by others."""
    size = int(np.lcm(shard_groups, world)) * multiple
    visits = epoch_order(0, 0, ends_of(sizes), "windows", 64, shard_groups)
    batches = len(visits) // size
    assume(done < batches)
    rows = batch_rows(size, shard_groups)
    assert sorted(rows) == list(range(size)) and (np.diff(rows % shard_groups) >= 0).all()
    coming = visits[done * size : batches * size]
    whole = coming.reshape(-1, size)[:, rows]
    ranks = [
        coming[rank_visits(len(coming), rank, world, size // world, shard_groups)]
        for rank in range(world)
    ]
    shares = [own.reshape(-1, size // world) for own in ranks]
    assert np.array_equal(np.concatenate(shares, axis=1), whole)


@given(
    seed=SEEDS,
    sizes=SIZES,
    shard_groups=GROUPS,
    nodes=st.integers(1, 6),
    ranks_per_node=st.integers(1, 3),
)
def test_a_node_visits_the_parts_of_its_groups_only(
    seed: int, sizes: list[int], shard_groups: int, nodes: int, ranks_per_node: int
) -> None:
    ends, world = ends_of(sizes), nodes * ranks_per_node
    size = int(np.lcm(shard_groups, world))
    visits = epoch_order(seed, 3, ends, "windows", 64, shard_groups)
    visits = visits[: len(visits) - len(visits) % size]
    runs = deal(seed, ends, shard_groups)
    for node in range(nodes):
        own = groups_of(node, nodes, shard_groups)
        if shard_groups % nodes == 0:
            assert len(own) == shard_groups // nodes
        allowed = set(runs.part[np.isin(runs.group, own)].tolist())
        seen: set[int] = set()
        for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
            own_visits = rank_visits(len(visits), rank, world, size // world, shard_groups)
            assert set(groups_of(rank, world, shard_groups)) <= set(own)
            seen |= set(np.searchsorted(ends, visits[own_visits], side="right").tolist())
        assert seen <= allowed


def test_the_deal_differs_between_seeds_and_stays_over_epochs() -> None:
    ends = np.arange(1, 101, dtype=np.int64) * 7
    first, other = (group_of(seed, ends, 4) for seed in (0, 1))
    assert 0.1 < (first == other).mean() < 0.45
    orders = [epoch_order(0, epoch, ends, "windows", 64, 4) for epoch in (0, 1)]
    assert (orders[0] == orders[1]).mean() < 0.05
    assert set(orders[0][0::4]) == set(orders[1][0::4])


def test_golden_groups_never_change() -> None:
    visits = epoch_order(0, 2, ends_of([3, 3, 3]), "windows", 4, 2)
    assert visits.tolist() == GOLDEN


GOLDEN = [0, 7, 1, 6, 3, 5, 2, 8, 4]


# Loaders


@pytest.fixture(scope="module")
def many(sharded: Callable[..., Path]) -> Path:
    return sharded(number=60, shard_mb=0.006)


def options(**others: Any) -> dict[str, Any]:
    order = {} if others.get("order") == "random" else {"order": "windows", "window": 24}
    return {"batch_size": 12, "shard_groups": 6, **order, **others}


@pytest.mark.parametrize(("world", "repeats"), [(3, 1), (4, 3), (12, 2)])
def test_any_number_of_ranks_gets_the_same_batches(many: Path, world: int, repeats: int) -> None:
    whole = list(loader(many, **options(repeats=repeats)))
    assert len(whole) == 5
    for batch in whole:  # a sample's views are its own
        pairs = zip(batch["index"].tolist(), batch["epoch"].tolist(), strict=True)
        assert len(set(pairs)) == 12
    ranks = [
        loader(many, **options(repeats=repeats, batch_size=12 // world, rank=r, world_size=world))
        for r in range(world)
    ]
    for rank in ranks[: world // 2]:  # those of a lost node come back in mid-epoch
        list(itertools.islice(rank, 2))
        rank.load_state_dict({"epoch": 0, "samples": 0})
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert same(joined(parts), batch)
    begun = loader(many, **options(repeats=repeats, batch_size=6, world_size=2, rank=1))
    list(itertools.islice(begun, 2))
    for rank in ranks:  # a resumed epoch loses and doubles nothing
        rank.load_state_dict(begun.state_dict())
    for batch, *parts in zip(whole[2:], *ranks, strict=True):
        assert same(joined(parts), batch)


@pytest.mark.parametrize(("order", "shard_groups"), [("windows", 1), ("windows", 6), ("random", 6)])
def test_an_epoch_goes_on_from_another_storage(many: Path, order: str, shard_groups: int) -> None:
    """A folder is one part; its samples still come in the order that the shards began."""
    began = loader(many, **options(order=order, shard_groups=shard_groups))
    whole = list(itertools.chain(began, began))
    began.epoch = 0
    list(itertools.islice(began, 2))
    other = loader(many.parent / "photos", **options(order=order, shard_groups=shard_groups))
    other.load_state_dict(json.loads(json.dumps(began.state_dict())))
    got = list(itertools.chain(other, other))
    assert len(got) == 8 and all(map(same, got, whole[2:]))


def test_a_state_of_other_data_is_refused(many: Path) -> None:
    ours = loader(many, **options())
    with pytest.raises(UserError, match=r"has 60 samples, but the loader's state is for 61"):
        ours.load_state_dict({"epoch": 0, "samples": 0, "parts": [30, 61]})


def test_repeats_come_in_a_row_within_their_group(many: Path) -> None:
    ours = loader(many, **options(repeats=2, shard_groups=2))
    whole = joined(list(ours))
    rows = whole["index"].reshape(-1, 2, 6).transpose(0, 1).reshape(2, -1, 2)  # group, pair, repeat
    epochs = whole["epoch"].reshape(-1, 2, 6).transpose(0, 1).reshape(2, -1, 2)
    assert (rows[..., 0] == rows[..., 1]).all()
    assert (epochs[..., 0] == 0).all() and (epochs[..., 1] == 1).all()
    assert len(set(rows[..., 0].flatten().tolist())) == 30


def test_the_tail_is_kept_on_one_rank(many: Path) -> None:
    batches = list(loader(many, **options(batch_size=18, drop_last=False)))
    assert [len(batch["index"]) for batch in batches] == [18, 18, 18, 6]
    assert sorted(joined(batches)["index"].tolist()) == list(range(60))


def test_a_bad_sample_s_stand_in_is_the_same_on_any_rank(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pospre.data.stores.mds import MdsReader
    from pospre.data.stores.reader import DamagedSample, Sample

    read = MdsReader.read

    def fail(self: MdsReader, index: int) -> Sample:
        if index % 7 == 3:
            raise DamagedSample(f"sample {index} is bad.")
        return read(self, index)

    monkeypatch.setattr(MdsReader, "read", fail)
    with pytest.warns(UserWarning, match="takes its place"):
        whole = list(loader(many, **options(bad_samples="skip")))
        ranks = [
            loader(many, **options(bad_samples="skip", batch_size=4, rank=rank, world_size=3))
            for rank in range(3)
        ]
        for batch, *parts in zip(whole, *ranks, strict=True):
            assert same(joined(parts), batch)
    assert not (joined(whole)["index"] % 7 == 3).any()


def test_the_samples_looked_at_first_are_the_machine_s_own(many: Path) -> None:
    assert loader(many).spread(4) == [0, 19, 39, 59]
    ours = loader(many, **options(batch_size=6, world_size=2, rank=1, nodes=2))
    group = group_of(ours.seed, ours.reader.parts, 6)
    assert len(set(ours.spread(30))) == 30 and min(group[ours.spread(30)]) == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shard_groups": 0}, r"shard_groups is 0: .*greater than 0"),
        ({"shard_groups": 5}, r"data\.shard_groups = 5 does not divide the batch of 12 samples"),
        ({"order": "random", "window": 24}, r"data.window = 24 has no effect with order = random"),
        ({"window": 5}, r"window is 5; .* at least .* each of 6 shard groups"),
    ],
)
def test_impossible_groups_are_refused(many: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        loader(many, **options(**wrong))


@pytest.mark.parametrize("wrong", [{"shuffle": False}, {"nodes": 2}, {"nodes": 0}])
def test_groups_without_sense_in_code_are_refused(many: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"shard groups need shuffle|1 ranks cannot be divided"):
        loader(many, **options(**wrong))
