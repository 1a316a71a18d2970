"""Masks: fixed counts, valid permutations, the published rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pospre import draws
from pospre.nn.masking import (
    Masking,
    PatchMasking,
    gather_tokens,
    num_visible,
    others,
    pooled,
    random_masking,
    scatter_tokens,
    slot_mask,
)


@pytest.mark.parametrize(
    ("slots", "ratio", "kept"),
    [(196, 0.75, 49), (100, 0.9, 9), (64, 0.8, 12), (196, 0.9, 19), (49, 0.75, 12), (196, 0, 196)],
)
def test_counts_are_the_published_floor(slots, ratio, kept):
    assert num_visible(slots, ratio) == kept


@settings(max_examples=25)
@given(slots=st.integers(1, 60), seed=st.integers(0, 2**40), data=st.data())
def test_kept_and_removed_partition_the_slots(slots, seed, data):
    kept = data.draw(st.integers(1, slots))
    keys = draws.sample_keys(seed, 0, torch.arange(3), 0, "mask")
    masking = random_masking(keys, slots, kept)
    assert masking.visible.shape == (3, kept)
    both = torch.cat(masking, dim=1).sort(1).values
    assert torch.equal(both, torch.arange(slots).expand(3, -1))


def test_scatter_undoes_gather():
    tokens = torch.randn(2, 10, 3)
    index = torch.stack([torch.randperm(10)[:4] for _ in range(2)])
    gathered = gather_tokens(tokens, index)
    background = tokens.masked_fill(slot_mask(index, 10).unsqueeze(-1), 0.0)
    assert torch.equal(scatter_tokens(background, index, gathered), tokens)


def test_uniform_masking_keeps_one_of_every_square():
    batch = {"index": torch.arange(30), "epoch": torch.ones(30, dtype=torch.int64)}
    masking = Masking(*PatchMasking((4, 6), 6, "uniform").draw(batch, seed=3).values())
    assert masking.visible.shape == (30, 6) and masking.hidden.shape == (30, 18)
    both = torch.cat([masking.visible, masking.hidden], dim=1).sort(dim=1).values
    assert torch.equal(both, torch.arange(24).expand(30, -1))
    row, col = masking.visible // 6, masking.visible % 6
    squares = (row // 2 * 3 + col // 2).sort(dim=1).values
    assert torch.equal(squares, torch.arange(6).expand(30, -1))


def test_the_others_are_what_is_left_in_order() -> None:
    assert others(torch.tensor([[3, 0], [1, 2]]), 5).tolist() == [[1, 2, 4], [0, 3, 4]]


def test_pooled_is_the_class_token_or_the_mean_of_the_patches() -> None:
    tokens = torch.tensor([[[9.0], [7.0], [1.0], [3.0]]])  # a class token, a register, two patches
    assert pooled(tokens, 2, class_token=True).tolist() == [[9.0]]
    assert pooled(tokens, 2, class_token=False).tolist() == [[2.0]]
