"""Memory comes back when the last tensor in it is gone, not before, and no more than promised."""

import gc
import sys

import torch

from pospre.data.batch_filler import BatchMemory
from pospre.data.views.options import ViewGroup
from tests.data.loading import loader, same


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
    assert memory.take(100).data_ptr() == place


def test_pieces_of_another_size_are_not_taken():
    memory = BatchMemory(most_kept=2)
    small = memory.take(10)
    place = small.data_ptr()
    del small
    assert len(memory.take(1000)) == 1000
    assert memory.take(10).data_ptr() == place


def test_no_more_is_kept_than_promised():
    memory = BatchMemory(most_kept=1)
    some = [memory.take(1 << 20) for _ in range(5)]
    places = {one.data_ptr() for one in some}
    del some
    gc.collect()
    others = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(4)]  # what went back
    held = [memory.take(1 << 20) for _ in range(2)]
    del others
    assert [one.data_ptr() in places for one in held] == [True, False]


def test_a_ctrl_c_is_not_lost_while_memory_comes_back():
    """It would be where Python code ran; a profile sees that there is none."""
    memory, seen = BatchMemory(most_kept=2), []
    lent = memory.take(100)
    place = lent.data_ptr()
    sys.setprofile(lambda frame, event, _: seen.append((event, frame.f_code.co_name)))
    del lent
    sys.setprofile(None)
    assert not [name for event, name in seen if event == "call"]
    assert memory.take(100).data_ptr() == place


def test_batches_that_are_kept_are_not_written_again(photos):
    ours = loader(photos, batch_size=2, pin_memory=False)
    kept = list(ours)
    ours.epoch = 0
    copies = [{key: value.clone() for key, value in batch.items()} for batch in ours]
    assert all(map(same, kept, copies))


def test_batches_share_the_memory_of_those_before(photos):
    views = [ViewGroup(size=256, count=2)]  # more than the C library would give again by itself
    ours = loader(photos, views=views, batch_size=1, num_workers=1, pin_memory=False)
    places = set()
    for batch in ours:
        places.add(batch["view/image"].untyped_storage().data_ptr())
        del batch
    assert len(ours) > 3 * ours.num_batches_held > 3 * len(places) - 1


def test_memory_is_not_given_away_while_threads_write(photos):
    """An iteration that is left early waits for them, and the next has memory of its own."""
    ours = loader(photos, batch_size=2, num_workers=3, pin_memory=False)
    expected = [batch["view/image"].clone() for batch in ours]
    for _ in range(10):
        ours.epoch = 0
        for batch, image in zip(ours, expected[:2], strict=False):
            assert torch.equal(batch["view/image"], image)
    ours.epoch = 0
    kept = next(iter(ours))["view/image"]
    ours.epoch = 0
    list(ours)
    assert torch.equal(kept, expected[0])
