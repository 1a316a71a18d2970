"""The block masks of global crops."""

import math

import pytest
import torch

from pospre import draws
from pospre.algorithms.dinov2.masks import CropMasking, around_rectangle, block_masks, masked_slots

PER_SAMPLE = CropMasking(0.5, (0.1, 0.5))
STRATIFIED = CropMasking(0.5, (0.1, 0.5), stratified=True)


def make_batch(size, epoch=2):
    return {"index": 5 + torch.arange(size), "epoch": torch.full((size,), epoch)}


def plain_mask(key, count, grid):
    """One mask by a loop over cells, as BEiT's description reads."""
    rows, cols = grid
    size, shape, top, left = draws.uniform(key, 160).view(4, 40).tolist()
    mask = torch.zeros(grid, dtype=torch.bool)
    refused = 0
    for i in range(40):
        limit = min(count - int(mask.sum()), rows // 2 * cols)
        if limit == 0 or refused == 10:
            break
        area = 4 + (limit - 4) * size[i]
        aspect = math.exp(math.log(0.3) * (1 - 2 * shape[i]))
        high, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        refused += 1
        if high >= rows or wide >= cols:
            continue
        y, x = int(top[i] * (rows - high + 1)), int(left[i] * (cols - wide + 1))
        block = mask[y : y + high, x : x + wide]
        if 0 < int((~block).sum()) <= limit:
            block[:] = True
            refused = 0
    return mask.flatten()


@pytest.mark.parametrize("grid", [(14, 14), (4, 4), (6, 9)])
def test_blocks_are_those_of_the_plain_loop(grid):
    keys = draws.sample_keys(1, 0, torch.arange(60), 0, "blocks")
    counts = torch.arange(60) % (grid[0] * grid[1] // 2)
    masks = block_masks(keys, counts, grid)
    for key, count, mask in zip(keys, counts.tolist(), masks, strict=True):
        assert torch.equal(mask, plain_mask(key, count, grid))


def test_counts_are_met_nearly_always_and_never_exceeded():
    batch = make_batch(1500)
    masks = PER_SAMPLE.draw(batch, (14, 14), 3)
    counts = PER_SAMPLE._per_sample(batch, (14, 14), 3)
    assert (masks.sum(-1) <= counts).all()
    hit = (masks.sum(-1) == counts)[counts > 0].float().mean()
    assert hit.item() == pytest.approx(0.93, abs=0.02)  # as measured of the published code
    share = masks.sum(-1)[counts > 0].float() / 196
    assert share.mean().item() == pytest.approx(0.297, abs=0.01)


def test_all_crops_can_be_masked():
    masks = CropMasking(1.0, (0.1, 0.5)).draw(make_batch(8), (14, 14), 3)
    assert masks.any(-1).all()


@pytest.mark.parametrize(("size", "rate"), [(16, 0.5), (7, 0.3), (1, 0.5)])
def test_published_masks_are_stratified_over_the_batch(size, rate):
    masking = CropMasking(rate, (0.1, 0.5), stratified=True)
    masked = int(2 * size * rate)
    counts = masking._stratified(make_batch(size), (14, 14), 3).flatten().sort().values
    assert (counts > 0).sum() == masked
    steps = torch.linspace(0.1, 0.5, masked + 1, dtype=torch.float64)
    for count, low, high in zip(counts[-masked:], steps, steps[1:], strict=False):
        assert int(196 * low) <= count <= int(196 * high)
    masks = masking.draw(make_batch(size), (14, 14), 3)
    assert masks.sum() <= counts.sum() <= sum(masking.bounds(size, 196))


def test_a_published_batch_has_samples_with_no_masked_crop_and_with_two():
    per_sample = STRATIFIED.draw(make_batch(64), (14, 14), 3).any(-1).sum(1)
    assert per_sample.sum() == 64
    assert set(per_sample.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("masking", [PER_SAMPLE, STRATIFIED])
def test_slots_hold_every_masked_patch_and_weigh_crops_alike(masking):
    masks = masking.draw(make_batch(12), (14, 14), 3)
    slots = masked_slots(masks, sum(masking.bounds(12, 196)))
    assert len(slots.patch) == len(slots.weight) == sum(masking.bounds(12, 196))
    used = slots.patch[slots.weight > 0]
    assert torch.equal(used, masks.flatten().nonzero().flatten())
    assert slots.weight.sum().item() == pytest.approx(12)  # the number of masked crops


def test_cyclic_masks_leave_the_first_cells_of_a_rectangle_that_is_rolled():
    golden = torch.tensor([[0.5, 0.0, 0.5, 0.25, 0.5]])  # aspect 1, top 0, left 1, rolled by 1, 2
    mask = around_rectangle(golden, torch.tensor([9]), (4, 4))
    assert "".join(map(str, mask[0].int().tolist())) == "1111001000101110"
    for rows, cols in ((16, 16), (6, 9)):
        drawn = draws.uniform(draws.sample_keys(1, 0, torch.arange(200), 0, "masks"), 5)
        counts = torch.arange(200) % (rows * cols)  # of none, nothing is masked
        rolled = around_rectangle(drawn, counts, (rows, cols))
        assert torch.equal(rolled.sum(1), counts)
        straight = around_rectangle(drawn * torch.tensor([1, 1, 1, 0, 0]), counts, (rows, cols))
        for mask, turned, (*_, down, right) in zip(straight, rolled, drawn.tolist(), strict=True):
            shifts = int(down * rows), int(right * cols)
            again = torch.roll(mask.view(rows, cols), shifts, (0, 1)).flatten()
            assert torch.equal(again, turned)
            row, col = (~mask).view(rows, cols).nonzero().unbind(1)
            number = (row - row[0]) * (int(col.max()) - int(col.min()) + 1) + col - col.min()
            assert number.tolist() == list(range(len(number)))


def test_cyclic_masks_mask_all_places_equally_often():
    masking = CropMasking(1.0, (0.1, 0.65), shape="cyclic")
    share = masking.draw(make_batch(3000), (16, 16), 3).float().mean((0, 1))
    assert share.mean().item() == pytest.approx(0.373, abs=0.005)
    assert (share - share.mean()).abs().max() < 5 * 0.0095 * (4000 / 6000) ** 0.5
    drawn = draws.uniform(draws.sample_keys(1, 0, torch.arange(3000), 0, "masks"), 5)
    drawn[:, 3:] = 0  # without the roll corners are masked, and the middle is not
    places = around_rectangle(drawn, torch.full((3000,), 96), (16, 16)).float().mean(0)
    assert places[0] > 0.8 and places[8 * 16 + 8] < 0.05
