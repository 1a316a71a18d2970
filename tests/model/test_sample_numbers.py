"""Samples without an index of their own, and epochs that are not counted."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pospre
from pospre.model import sample_numbers
from tests.algorithms.cases import Case
from tests.refusals import refuses


def noise(step: int, **numbers: Any) -> pospre.batch.Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return pospre.from_images(images, **{"index": torch.arange(4), "epoch": 0, **numbers})


@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_index_that_starts_anew_in_every_batch_is_an_error(microbatches: int) -> None:
    model = Case(("mae", "droppos")).build()

    def step(number: int) -> None:
        whole = noise(number)
        for rows in torch.arange(4).chunk(microbatches):
            model.prepare({k: v[rows] for k, v in whole.items()}, 0.0)

    for number in range(2):
        step(number)
    refuses(r"the same 'index' and 'epoch', .* position in the data set", lambda: step(2))


def test_an_epoch_of_two_such_batches_is_found_in_the_next() -> None:
    model = Case(("mae",)).build()
    model.prepare({k: v[:2] for k, v in noise(9, epoch=7).items()}, 0.0)  # tried on two images
    for step in range(3):
        model.prepare(noise(step, epoch=step // 2), 0.0)
    refuses(
        r"the same 'index' and 'epoch', .* position in the data set",
        lambda: model.prepare(noise(3, epoch=1), 0.0),
    )


def test_some_samples_that_come_twice_are_no_error() -> None:
    model = Case(("mae",)).build()
    for step in range(5):  # of a sampler that fills its batches up, in any order
        model.prepare(noise(step, index=torch.tensor([3 * step, 0, 3 * step + 1, 1])), 0.0)


def test_numbers_that_count_are_no_error() -> None:
    model = Case(("mae",)).build()
    for epoch in range(3):
        for step in range(3):
            index = torch.arange(4) + 4 * step
            model.prepare(noise(step, index=index, epoch=epoch), 0.0)
    for _ in range(4):  # one batch, again and again, to see whether it is learned
        model.prepare(noise(7, epoch=9), 0.0)
    model.eval()
    for step in range(4):
        model.prepare(noise(step), 0.0)


@pytest.mark.parametrize("looked_at", [2, 256])  # epochs may be longer than the first look
@pytest.mark.parametrize(
    ("index", "epoch", "warned"),
    [
        (lambda step: 4 * (step % 4), lambda step: 0, True),
        (lambda step: 4 * (step % 4), lambda step: step // 4, False),
        (lambda step: 4 * (step % 4), lambda step: step // 8, False),
        (lambda step: 4 * step, lambda step: 0, False),  # a stream
        (lambda step: 10**12 + step % 4, lambda step: 0, False),  # hashes
    ],
)
def test_an_epoch_that_is_always_0_is_said_once(
    index: Callable[[int], int],
    epoch: Callable[[int], int],
    warned: bool,
    looked_at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample_numbers, "_LOOKED_AT", looked_at)
    monkeypatch.setattr(sample_numbers, "_SAMPLES", 32)
    numbers = sample_numbers.SampleNumbers()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(24):  # images that are not augmented are the same in every epoch
            batch = noise(step % 4, index=index(step) + torch.arange(4), epoch=epoch(step))
            numbers.look(batch)
    assert len(said) == warned
    assert not warned or "'epoch' is 0 for 84 samples" in str(said[0].message)
    assert not warned or "only goes up to 15" in str(said[0].message)
