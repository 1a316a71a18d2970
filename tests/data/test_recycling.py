"""Memory comes back when the last tensor in it is gone, not before, and no more than promised."""

import gc
from typing import Any

import torch

from pospre.data.loader import build_loader
from pospre.data.recycling import BatchMemory
from pospre.data.views import ViewGroup


def test_memory_comes_back_when_nothing_is_left_of_it():
    memory = BatchMemory(most_kept=2)
    whole = memory.take(100)
    place, part = whole.data_ptr(), whole.view(10, 10)[3:, 2:].permute(1, 0)
    array = part.numpy()
    del whole, part
    gc.collect()
    assert memory.take(100).data_ptr() != place  # the array is still in it
    del array
    gc.collect()
    assert place in {one.data_ptr() for one in (memory.take(50), memory.take(100))}


def test_pieces_that_are_too_small_are_let_go():
    memory = BatchMemory(most_kept=2)
    small = memory.take(10)
    del small
    assert len(memory.take(1000)) == 1000


def test_no_more_is_kept_than_promised():
    memory = BatchMemory(most_kept=1)
    some = [memory.take(1 << 10) for _ in range(5)]
    places = {one.data_ptr() for one in some}
    del some
    gc.collect()
    held = [memory.take(1 << 10) for _ in range(2)]
    assert held[0].data_ptr() in places
    assert len(memory._free) == 0


def test_batches_that_are_kept_are_not_written_again(photos):
    options: dict[str, Any] = {
        "views": [ViewGroup(size=16, count=2)],
        "batch_size": 2,
        "seed": 1,
    }
    loader = build_loader(photos, **options, num_workers=2)
    kept = list(loader)
    loader.epoch = 0
    copies = [{key: value.clone() for key, value in batch.items()} for batch in loader]
    for batch, other in zip(kept, copies, strict=True):
        assert all(torch.equal(value, other[key]) for key, value in batch.items())


def test_batches_share_the_memory_of_those_before(photos):
    loader = build_loader(
        photos, views=[ViewGroup(size=16)], batch_size=1, seed=1, num_workers=1, pin_memory=False
    )
    places = []
    for epoch in range(3):
        loader.epoch = epoch
        for batch in loader:
            places.append(batch["view/image"].untyped_storage().data_ptr())
            del batch
    assert len(places) > 3 * loader.num_batches_held > len(set(places))
