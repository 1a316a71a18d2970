"""A recorded function: plain without a GPU, on one the same bits for each shape and each call."""

import inspect

import pytest
import torch

from pospre import draws
from pospre.algorithms.dinov2.masks import block_masks
from pospre.nn.cuda_graph import replayed


def test_without_a_gpu_the_function_is_called_as_it_is():
    calls = []

    @replayed
    def scaled(values, factor):
        calls.append(factor)
        return values * factor

    values = torch.arange(3)
    assert scaled(values, 2).tolist() == [0, 2, 4] and scaled(values, 3).tolist() == [0, 3, 6]
    assert calls == [2, 3] and scaled.__name__ == "scaled"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_replay_has_the_bits_of_a_call():
    function = inspect.unwrap(block_masks)
    for num, grid in [(8, (14, 14)), (4, (6, 6)), (8, (14, 14)), (8, (7, 14))]:
        for seed in range(3):
            index = torch.arange(num, device="cuda")
            keys = draws.sample_keys(seed, 0, index, 0, "blocks")
            counts = torch.randint(0, grid[0] * grid[1] // 2, (num,), device="cuda")
            found, before = block_masks(keys, counts, grid), counts.clone()
            assert torch.equal(found, function(keys, counts, grid))
            block_masks(keys.flip(0), counts, grid)  # what was returned is the caller's
            assert torch.equal(found, function(keys, counts, grid))
            assert torch.equal(counts, before)
