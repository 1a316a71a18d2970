"""Position accuracy of MP3: known predictors, and a whole evaluation."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.batch import Batch
from pospre.evaluation.position.patch_position import summarise
from pospre.evaluation.position.predictions import Placed, tally
from pospre.evaluation.registry import check_settings
from tests.evaluation.checkpoints import results_of, tiny_recipe

PATCHES = 16
Evaluate = Callable[..., dict[str, Any]]


def batches(count: int = 3, size: int = 5) -> Iterator[Batch]:
    for start in range(0, count * size, size):
        yield {"index": torch.arange(start, start + size)}


def predictor(batch: Batch, mask_ratio: float | None, *, rank: int = 0, told: int = 0) -> Placed:
    """Rank the true position ``rank``-th (0 is first) for everyone in the context, first elsewhere.

    The context is the first patches; the last ``told`` patches are not asked.
    """
    rows, patch = len(batch["index"]), torch.arange(PATCHES)
    assert mask_ratio is not None
    context = (patch < PATCHES * (1 - mask_ratio)).expand(rows, -1)
    others = torch.linspace(1.0, 2.0, PATCHES).repeat(PATCHES, 1).roll(1, 1)
    true = torch.eye(PATCHES, dtype=torch.bool)
    first = torch.where(true, 3.0, others)
    ranked = others.masked_fill(true, -1.0).sort(dim=1, descending=True).values
    lower = ranked[:, rank - 1 : rank] - 1e-4 if rank else torch.full((PATCHES, 1), 3.0)
    logits = torch.where(context.unsqueeze(-1), torch.where(true, lower, others), first)
    asked = (patch < PATCHES - told).expand(rows, -1)
    return Placed(logits, patch.expand(rows, -1), asked, context)


def counted(ratios: tuple[float, ...] = (0.0, 0.75), **options: Any) -> dict[str, Any]:
    cells = [(ratio,) for ratio in ratios]
    return summarise(tally({"": partial(predictor, **options)}, batches(), cells), (4, 4))


def test_perfect_predictor_is_always_right() -> None:
    results = counted()
    assert [row["context"] for row in results["ratios"]] == [16, 4]
    assert all(row["top1"] == row["top5"] == row["context_top1"] == 1 for row in results["ratios"])
    assert [row["masked_top1"] for row in results["ratios"]] == [None, 1]
    assert results["mean"] == 1
    assert results["samples"] == 15 and results["ratios"][0]["patches"] == 15 * 16
    assert results["chance"] == 1 / 16 and results["chance_top5"] == 5 / 16
    assert results["ratios"][0]["initial_top1"] is None


@pytest.mark.parametrize(("rank", "top5"), [(1, 1.0), (4, 1.0), (5, 0.75)])
def test_context_and_others_are_counted_apart_and_five_guesses_are_five(
    rank: int, top5: float
) -> None:
    row = counted((0.75,), rank=rank)["ratios"][0]
    assert row["context_top1"] == 0 and row["masked_top1"] == 1
    assert row["top1"] == 0.75 and row["top5"] == top5


def test_patches_that_are_told_their_position_are_not_asked() -> None:
    row = counted((0.75,), rank=1, told=12)["ratios"][0]
    assert row["patches"] == 15 * 4 and row["top1"] == 0 and row["masked_top1"] is None


def test_mask_ratios_are_read_from_a_command_line_and_from_a_recipe() -> None:
    for given in ("0,0.5", "[0, 0.5]", [0.0, 0.5]):
        settings = check_settings("patch_position", {"mask_ratios": given}).values()
        assert settings["mask_ratios"] == (0.0, 0.5)


@pytest.fixture
def evaluate(tmp_path: Path) -> Evaluate:
    def run(data: Path, options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
        positions = "sincos" if options else "none"
        recipe = tiny_recipe(tmp_path, {"mp3": options or {}}, positions=positions)
        return results_of("patch_position", recipe, data, **settings)

    return run


def test_batch_size_changes_nothing(evaluate: Evaluate, image_folder: Callable[..., Path]) -> None:
    data = image_folder(num_images=7)
    results = evaluate(data, batch_size=7)
    assert evaluate(data, batch_size=3) == results
    assert [row["mask_ratio"] for row in results["ratios"]] == [0.0, 0.25, 0.5, 0.75]
    assert [row["patches"] for row in results["ratios"]] == [7 * PATCHES] * 4
    assert all(row["initial_top1"] is not None for row in results["ratios"])
    assert results["grid"] == [4, 4] and results["samples"] == 7


def test_told_positions_are_told_in_the_evaluation_too(
    evaluate: Evaluate, image_folder: Callable[..., Path]
) -> None:
    settings = {"mask_ratios": [0.0], "baseline": False, "num_samples": 3}
    data = image_folder(num_images=5)
    results = evaluate(data, {"position_rate": 0.25}, **settings)
    assert results["ratios"][0]["patches"] == 3 * 12 and results["samples"] == 3
