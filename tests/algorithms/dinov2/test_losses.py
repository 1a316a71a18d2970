"""Targets from prototype logits, alone and over two ranks, and the losses against them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pospre.algorithms.dinov2.losses import (
    Center,
    cross_view_entropy,
    cross_view_loss,
    koleo,
    sinkhorn,
    soft_cross_entropy,
)
from tests.operators import CountedOperators


def logits(rows, prototypes=16, scale=1.0):
    generator = torch.Generator().manual_seed(rows)
    return scale * torch.randn(rows, prototypes, generator=generator)


def dino(student, targets):
    return cross_view_loss(cross_view_entropy(student, targets, 0.1))


def plain_sinkhorn(scores, temperature, iterations=3):
    """The algorithm as it is written down, in double precision."""
    matrix = (scores.double() / temperature).exp().T
    matrix /= matrix.sum()
    for _ in range(iterations):
        matrix /= matrix.sum(1, keepdim=True) * len(matrix)
        matrix /= matrix.sum(0, keepdim=True) * matrix.shape[1]
    return (matrix * matrix.shape[1]).T.float()


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_sinkhorn_is_the_plain_algorithm_and_samples_sum_to_one(iterations):
    targets = sinkhorn(logits(12), 0.07, iterations=iterations)
    torch.testing.assert_close(
        targets, plain_sinkhorn(logits(12), 0.07, iterations), atol=1e-6, rtol=1e-4
    )
    torch.testing.assert_close(targets.sum(1), torch.ones(12), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1e2, 1e30])
def test_huge_logits_stay_finite(scale):
    targets = sinkhorn(logits(12, scale=scale), 0.04)
    assert targets.isfinite().all()
    torch.testing.assert_close(targets.sum(1), torch.ones(12), atol=1e-6, rtol=0)


def test_adding_a_number_to_all_logits_changes_nothing():
    shifted = sinkhorn(logits(12) + 1000, 0.07)
    torch.testing.assert_close(shifted, sinkhorn(logits(12), 0.07), atol=1e-2, rtol=0)


@pytest.mark.parametrize("padding", [0, 5])
def test_half_precision_logits_have_their_float32_targets_without_a_copy(padding):
    half, temperature = logits(12).bfloat16(), torch.tensor(0.07)
    weights = torch.ones(12) if padding else None
    if weights is not None:
        weights[-padding:] = 0
    with CountedOperators() as operators:
        targets = sinkhorn(half, temperature, weights)
    assert torch.equal(targets, sinkhorn(half.float(), 0.07, weights))
    assert targets.dtype == torch.float32 and not operators.counts["_to_copy"]


def test_autocast_does_not_reach_sinkhorn():
    with torch.autocast("cpu", torch.bfloat16):
        targets = sinkhorn(logits(12), 0.07)
    assert torch.equal(targets, sinkhorn(logits(12), 0.07))


@pytest.mark.parametrize("padding", [0.0, 1e4, -1e4])
def test_padding_rows_count_for_nothing(padding):
    weights = torch.ones(12)
    weights[[0, 5, 11]] = 0
    padded = torch.where(weights.unsqueeze(1) > 0, logits(12), padding)
    targets = sinkhorn(padded, 0.07, weights)
    assert not targets[weights == 0].any()
    torch.testing.assert_close(targets[weights > 0], sinkhorn(logits(12)[weights > 0], 0.07))
    assert not sinkhorn(padded, 0.07, 0 * weights).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_centre_follows_the_mean_of_a_step_and_enters_at_the_next(compiled, whole_graph):
    center: Any = Center(16)
    if compiled:
        center.forward = whole_graph(center.forward)
    first, second = logits(6) + 3, logits(8)
    weights = torch.tensor([1.0, 1, 1, 0, 0.5, 1])
    targets = center(first, 0.07, weights)
    expected = torch.softmax(first / 0.07, -1) * (weights > 0).unsqueeze(1)
    torch.testing.assert_close(targets, expected)
    torch.testing.assert_close(center(second, 0.07), torch.softmax(second / 0.07, -1))
    center.after_step()
    mean = 0.1 * torch.cat([first[weights > 0], second]).mean(0)  # of all rows of both
    for _ in range(2):  # the second is without rows
        torch.testing.assert_close(center.center_K, mean)
        center.after_step()
    torch.testing.assert_close(center(second, 0.07), torch.softmax((second - mean) / 0.07, -1))


def test_the_centre_stays_in_evaluation_and_without_samples():
    center = Center(16)
    center(logits(6), 0.07, torch.zeros(6))
    center.after_step()
    center.eval()
    center(logits(6), 0.07)
    center.after_step()
    assert not center.center_K.any()


def two_ranks(rank: int, folder: str) -> None:
    """Solve this rank's share of the problems of the test below."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meet", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = []
    for shares in SHARES:
        first, mine = sum(shares[:rank]), shares[rank]
        padded, weights = torch.randn(9, 16) * 50, torch.zeros(9)
        padded[:mine], weights[:mine] = logits(sum(shares))[first : first + mine], 1
        center = Center(16)
        center(padded, 0.07, weights)
        center.after_step()
        found.append((sinkhorn(padded, 0.07, weights)[:mine], center.center_K))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's own end waits forever at times


SHARES = ((6, 6), (9, 2), (0, 7))


def test_two_ranks_equal_one_that_has_all_samples(tmp_path: Path):
    mp.start_processes(two_ranks, (str(tmp_path),), nprocs=2, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for shares, first, second in zip(SHARES, *found, strict=True):
        whole = sinkhorn(logits(sum(shares)), 0.07)
        torch.testing.assert_close(torch.cat([first[0], second[0]]), whole, atol=1e-6, rtol=1e-5)
        center = Center(16)
        center(logits(sum(shares)), 0.07)
        center.after_step()
        assert torch.equal(first[1], second[1])
        torch.testing.assert_close(first[1], center.center_K)


def test_equal_logits_at_equal_temperature_cost_their_entropy():
    targets = torch.softmax(logits(5) / 0.1, -1)
    entropy = torch.special.entr(targets).sum(-1)
    torch.testing.assert_close(soft_cross_entropy(logits(5), targets, 0.1), entropy)


def test_every_crop_meets_every_other_global_crop():
    student = torch.stack([logits(4 + crop)[:4] for crop in range(5)], dim=1)
    targets = torch.softmax(torch.stack([logits(20)[:4], logits(21)[:4]], dim=1), -1)
    pairs = [
        soft_cross_entropy(student[:, crop], targets[:, other], 0.1).mean()
        for crop in range(5)
        for other in range(2)
        if crop != other
    ]
    assert len(pairs) == 2 + 2 * 3
    torch.testing.assert_close(dino(student, targets), torch.stack(pairs).mean())
    swapped = dino(student, targets.flip(1))
    assert abs(swapped - dino(student, targets)) > 1e-3
    only_global = torch.stack([pairs[0], pairs[1]]).mean()
    torch.testing.assert_close(dino(student[:, :2], targets), only_global)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_features_and_a_single_image_stay_finite(dtype):
    equal = torch.ones(4, 16, dtype=dtype, requires_grad=True)
    koleo(equal).backward()
    assert equal.grad is not None and equal.grad.isfinite().all()
    assert koleo(equal[:1]) == 0
