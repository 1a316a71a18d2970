"""Where a loader is: ranks, resuming, and what is left out is not read."""

import itertools
from collections.abc import Iterable

import pytest

from pospre import draws
from pospre.batch import Batch
from pospre.errors import UserError
from tests.data.loading import count_calls, joined, loader, same

pytestmark = pytest.mark.science


def test_skipping_equals_iterating(photos, monkeypatch):
    whole = list(loader(photos))
    ours = loader(photos)
    read = count_calls(monkeypatch, ours.reader, "read")
    ours.load_state_dict({"epoch": 0, "samples": 3 * ours.batch_size})
    rest = list(ours)
    assert len(rest) == 2 and all(itertools.starmap(same, zip(rest, whole[3:], strict=True)))
    assert sorted(index for (index,) in read) == sorted(
        joined(rest)["index"].tolist()
    )  # nothing skipped was read
    assert len(list(ours)) == len(ours) == 5


def numbers(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """Return epoch and first sample of each batch."""
    return [(int(batch["epoch"][0]), int(batch["index"][0])) for batch in batches]


def expected_numbers(epoch: int, first: int = 0) -> list[tuple[int, int]]:
    """Return those of 22 samples in batches of 4."""
    return [(epoch, int(index)) for index in draws.order(3, epoch, 22)[first:20:4]]


def test_every_iteration_is_the_next_epoch(photos):
    ours = loader(photos)
    for epoch in range(3):
        assert ours.epoch == epoch
        assert numbers(ours) == expected_numbers(epoch)
    ours.epoch = 1
    assert numbers(ours) == expected_numbers(1)
    assert numbers(ours) == expected_numbers(2)


def test_an_iteration_that_is_broken_off_counts(photos):
    ours = loader(photos)
    for _ in range(2):
        next(iter(ours))
    half = list(itertools.islice(ours, 2))
    assert numbers(half) == expected_numbers(2)[:2] and ours.epoch == 2
    ours.load_state_dict(ours.state_dict())
    assert numbers(ours) == expected_numbers(2, 8)
    assert numbers(ours) == expected_numbers(3)
    next(iter(ours))
    ours.epoch = ours.epoch
    assert numbers(ours) == expected_numbers(4)


def test_the_position_within_an_epoch_and_at_its_end(photos):
    ours = loader(photos)
    assert ours.state_dict() == {"epoch": 0, "samples": 0}
    for number, _ in enumerate(ours, 1):
        assert ours.state_dict() == {"epoch": 0, "samples": 4 * number}
    assert ours.state_dict() == {"epoch": 1, "samples": 0}
    batches = iter(ours)
    assert ours.state_dict() == {"epoch": 1, "samples": 0}
    next(batches)
    ours.load_state_dict({"epoch": 1, "samples": 12})
    next(batches)  # one that was left behind
    assert ours.state_dict() == {"epoch": 1, "samples": 12}
    next(iter(ours))
    assert ours.state_dict() == {"epoch": 1, "samples": 16}

    tail = loader(photos, drop_last=False)
    assert [tail.state_dict()["samples"] for _ in tail] == [4, 8, 12, 16, 20, 22]
    tail.load_state_dict({"epoch": 0, "samples": 22})
    assert list(tail) == [] and tail.epoch == 1


def test_the_position_is_that_of_the_latest_iteration(photos):
    ours = loader(photos)
    first, second = iter(ours), iter(ours)
    next(first)
    assert ours.state_dict() == {"epoch": 1, "samples": 0}
    next(second)
    next(first)
    assert ours.state_dict() == {"epoch": 1, "samples": 4}
    assert len(list(first)) == 3 and ours.epoch == 1


def test_an_iterator_left_behind_does_not_end_the_next_ones_reading(photos, monkeypatch):
    ours = loader(photos)
    expected = count_calls(monkeypatch, ours.reader, "expect")
    closed = count_calls(monkeypatch, ours.reader, "close")
    first = iter(ours)
    next(first)
    second = iter(ours)
    next(second)
    del first
    assert (len(expected), len(closed)) == (2, 0)
    assert len(list(second)) == len(ours) - 1
    assert len(closed) == 1


@pytest.mark.parametrize("state", [{}, {"epoch": 0, "samples": 23}])
def test_a_state_that_cannot_be_of_these_data_is_refused(photos, state):
    with pytest.raises(UserError, match=r"has 22 samples, but the loader's state is"):
        loader(photos).load_state_dict(state)
