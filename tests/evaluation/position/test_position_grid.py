"""The position grid: the published counts, known predictors, and a whole evaluation."""

import itertools
from functools import partial

import pytest
import torch

from pospre.evaluation.position.position_grid import MASK_RATIOS, POSITION_MASK_RATIOS, summarise
from pospre.evaluation.position.predictions import WEIGHT, Placed, tally
from pospre.evaluation.registry import UNTRAINED
from tests.algorithms.dropped import draw_masks
from tests.evaluation.checkpoints import measured

CELLS = tuple(itertools.product(MASK_RATIOS, POSITION_MASK_RATIOS))

# Kept and dropped positions per γ (K = 196, 147, 98, 49) and γ_pos, as published.
PUBLISHED_COUNTS = [
    [(147, 49), (98, 98), (49, 147), (9, 187)],
    [(110, 37), (73, 74), (36, 111), (7, 140)],
    [(73, 25), (49, 49), (24, 74), (4, 94)],
    [(36, 13), (24, 25), (12, 37), (2, 47)],
]


def image_batches(num_images: int, size: int = 50):
    for start in range(0, num_images, size):
        index = torch.arange(start, min(start + size, num_images))
        yield {"index": index, "epoch": torch.zeros_like(index)}


def predictor(num_patches, answer):
    """Return a predictor whose logits are highest at ``answer(keep)``."""

    def predict(batch, mask_ratio, position_mask_ratio):
        masks = draw_masks(
            batch,
            (1, num_patches),
            mask_ratio=mask_ratio,
            position_mask_ratio=position_mask_ratio,
            seed=0,
        )
        keep = masks["view/visible"]
        logits = torch.nn.functional.one_hot(answer(keep), num_patches).float()
        asked = ~masks["droppos/known"]
        return Placed(logits, keep, asked, torch.ones_like(asked))

    return predict


def test_counts_are_the_published_ones():
    counts = tally({"": predictor(196, lambda keep: keep)}, image_batches(2), CELLS)
    cells = summarise(counts, (14, 14))["cells"]
    assert [cell["visible"] for cell in cells[::4]] == [196, 147, 98, 49]
    found = [(cell["kept"], cell["dropped"]) for cell in cells]
    assert found == [pair for row in PUBLISHED_COUNTS for pair in row]
    assert [cell["tokens"] for cell in cells] == [2 * dropped for _, dropped in found]
    assert cells[0]["chance"] == 1 / 196 and cells[0]["chance_excluding"] == 1 / 49


def test_constant_predictor_is_at_chance():
    counts = tally({"": predictor(16, torch.zeros_like)}, image_batches(400, 400), CELLS)
    for cell in summarise(counts, (4, 4))["cells"]:
        # five standard deviations of a share of so many guesses
        spread = 5 * (cell["chance"] * (1 - cell["chance"]) / cell["tokens"]) ** 0.5
        assert abs(cell["accuracy"] - cell["chance"]) < spread


def test_cells_are_weighted_alike():
    counts = tally(
        {
            "": predictor(16, lambda keep: keep),
            UNTRAINED: predictor(16, lambda keep: (keep + 1) % 16),
        },
        image_batches(3),
        CELLS,
    )
    counts[0.0, 0.25][""]["top1"].zero_()
    results = summarise(counts, (4, 4))
    assert results["mean"] == pytest.approx(15 / 16) and results["initial_mean"] == 0.0
    assert results["mean_difference"] == pytest.approx(15 / 16)
    assert results["mean_se"] == results["mean_difference_se"] == 0  # each image the same


def test_weighted_accuracy_is_the_published_codes():
    """Σ w·right / Σ w over the tokens asked for, w an image's shares of its visible patches."""
    weights = torch.rand(7, 16, generator=torch.Generator().manual_seed(1))
    right = weights > 0.6  # the patches that the model puts in their place

    def predict(batch, *ratios):
        found = predictor(16, lambda keep: keep)(batch, *ratios)
        known = right[batch["index"]].gather(1, found.places)
        answers = torch.where(known, found.places, (found.places + 1) % 16)
        return found._replace(logits=torch.nn.functional.one_hot(answers, 16).float())

    def counted(size):
        return tally(
            {"": predict},
            ({**each, WEIGHT: weights[each["index"]]} for each in image_batches(7, size)),
            [cell for cell in CELLS if cell[0] == 0.5],
        )

    cell = summarise(counted(7), (4, 4))["cells"][1]
    ((_, keep, dropped, _),) = [predict(each, 0.5, 0.5) for each in image_batches(7)]
    visible = weights.gather(1, keep)
    share = visible / visible.sum(1, keepdim=True) * dropped
    wanted = (share * right.gather(1, keep)).sum() / share.sum()
    assert cell["weighted_accuracy"] == pytest.approx(float(wanted), rel=1e-6)
    assert abs(cell["weighted_accuracy"] - cell["accuracy"]) > 0.01
    results, others = (summarise(counted(size), (4, 4)) for size in (7, 3))
    assert results["weighted_mean"] == pytest.approx(others["weighted_mean"], rel=1e-12)


@pytest.fixture
def evaluate(droppos_checkpoint):
    return partial(measured, "position_grid", droppos_checkpoint)


def test_batch_size_changes_nothing(evaluate, image_folder):
    data = image_folder(num_images=5)
    results, others = (evaluate(data, batch_size=size) for size in (5, 3))
    for one, other in zip(
        [results, *results["cells"]], [others, *others["cells"]], strict=True
    ):  # sums of weights, not of whole numbers
        key = "weighted_mean" if one is results else "weighted_accuracy"
        assert one[key] == pytest.approx(other.pop(key), rel=1e-5)
        other[key] = one[key]
    assert others == results
    assert len(results["cells"]) == len(MASK_RATIOS) * len(POSITION_MASK_RATIOS)
    assert results["grid"] == [4, 4] and results["samples"] == 5
    assert all(cell["initial_accuracy"] is not None for cell in results["cells"])
    assert 0 < results["weighted_mean"] < 1
