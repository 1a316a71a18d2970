"""One data set in three formats: the same samples to the bit, however they are read and shared.

The reference is the image folder, read without threads, one sample after the other.
"""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pospre.data.loader import ViewLoader, build_loader
from pospre.data.views.options import ViewGroup
from tests.data.conftest import FORMATS, NUM_IMAGES
from tests.processes import finished, launcher

pytestmark = pytest.mark.science

VIEWS = (
    ViewGroup(name="global", count=2, size=32),
    ViewGroup(name="local", count=3, size=16, scale=(0.05, 0.2), interpolation="bilinear"),
    ViewGroup(name="query", count=2, size=8, scale=(0.1, 0.5), inside="global"),
)
KEYS = {"index", "epoch", "label"} | {
    f"{group}/{kind}" for group in ("global", "local", "query") for kind in ("image", "box", "flip")
}
Samples = list[dict[str, Tensor]]
AGREE = settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def loader(path: Path, **options: Any) -> ViewLoader:
    settings: dict[str, Any] = {"views": VIEWS, "batch_size": 1, "seed": 3, "num_workers": 0}
    return build_loader(path, **{**settings, **options})


def samples(batches: list[dict[str, Tensor]]) -> Samples:
    return [
        {key: value[row] for key, value in batch.items()}
        for batch in batches
        for row in range(len(batch["index"]))
    ]


@pytest.fixture(scope="module")
def reference(photos: Path) -> Callable[..., Samples]:
    """Return ``reference(epoch, **options)``: an epoch's samples in order."""

    @cache
    def read(epoch: int, **options: Any) -> Samples:
        ours = loader(photos, **options)
        ours.epoch = epoch
        return samples(list(ours))

    return read


def assert_same(found: Samples, expected: Samples) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys() == KEYS
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), f"{key} of sample {number}"


def read_ranks(path: Path, world: int, state: dict[str, int], **options: Any) -> Samples:
    """Return the samples of all ranks, in the order of the global batches."""
    ranks = []
    for rank in range(world):
        ours = loader(path, rank=rank, world_size=world, **options)
        ours.load_state_dict(state)
        ranks.append(list(ours))
    return samples([batch for batches in zip(*ranks, strict=True) for batch in batches])


@pytest.mark.parametrize("name", FORMATS)
@AGREE
@given(
    world=st.integers(1, 3),
    batch_size=st.integers(1, 7),
    num_workers=st.sampled_from([0, 1, 3, 40]),
    repeats=st.integers(1, 3),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
    start=st.integers(0, NUM_IMAGES),
)
def test_any_way_to_read_gives_the_reference(
    stored, reference, name, world, batch_size, num_workers, repeats, shuffle, epoch, start
):
    expected = reference(epoch, repeats=repeats, shuffle=shuffle)[start:]
    whole = len(expected) // (world * batch_size) * world * batch_size
    found = read_ranks(
        stored(name),
        world,
        {"epoch": epoch, "samples": start},
        batch_size=batch_size,
        num_workers=num_workers,
        repeats=repeats,
        shuffle=shuffle,
    )
    assert_same(found, expected[:whole])


@AGREE
@given(
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    first=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(0, 2)),
    second=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    epoch=st.integers(0, 1),
)
def test_a_run_goes_on_in_another_format_and_on_other_ranks(
    stored, reference, formats, first, second, epoch
):
    """``first``: ranks, batch size and batches of the run that stops; ``second``: of the next."""
    world, batch_size, num_batches = first
    stopped = loader(stored(formats[0]), world_size=world, batch_size=batch_size, num_workers=2)
    stopped.load_state_dict({"epoch": epoch, "samples": 0})
    batches = iter(stopped)
    for _ in range(num_batches):
        next(batches)
    state = stopped.state_dict()
    assert state == {"epoch": epoch, "samples": num_batches * world * batch_size}
    world, batch_size = second
    expected = reference(epoch)[state["samples"] :]
    whole = len(expected) // (world * batch_size) * world * batch_size
    found = read_ranks(stored(formats[1]), world, state, batch_size=batch_size)
    assert_same(found, expected[:whole])


def test_two_ranks_in_composer_share_a_beton_exactly(stored, tmp_path):
    """Two epochs, stopped within the second and resumed, are those of one process."""
    script = Path(__file__).with_name("two_ranks_loader.py")
    path, batch_size, stop = stored("ffcv"), 3, 5
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    done = finished(
        [*launcher(2), str(script), str(path), str(batch_size), str(tmp_path), str(stop)],
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    steps = NUM_IMAGES // (2 * batch_size)
    assert [len(seen) for seen in ranks] == [2 * steps] * 2

    alone = build_loader(
        path, views=[ViewGroup(size=16, count=2)], batch_size=batch_size, seed=5, num_workers=1
    )
    for alone.epoch in range(2):
        batches = iter(alone)
        for step in range(steps * alone.epoch, steps * (alone.epoch + 1)):
            for seen in ranks:
                batch = next(batches)
                pixels = int(batch.pop("view/image").long().sum())
                expected = {key: value.tolist() for key, value in batch.items()}
                assert seen[step] == {**expected, "pixels": pixels}
        indices = [
            i
            for seen in ranks
            for noted in seen[step + 1 - steps : step + 1]
            for i in noted["index"]
        ]
        assert len(indices) == len(set(indices)) == steps * 2 * batch_size
