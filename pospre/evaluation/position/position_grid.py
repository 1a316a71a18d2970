"""Position accuracy over a grid of mask ratios, as in DropPos (Wang et al. 2023).

γ is the share of hidden patches, and γ_pos that of hidden positions. For every pair, it measures
how many patches without position the model places correctly: top-1 over the dropped tokens of all
images. The mask is seeded per image, so two models get the same one; centre view, no flip. The
accuracy is given unweighted, and weighted by the attentive weights of a model that trains with
them. The published code prints the weighted one, so the paper's figures (87.83) compare with
``weighted_mean``.

The counts are the method's: of N patches, floor(N(1−γ)) = K are visible; floor(K(1−γ_pos)) of them
keep their position, and the rest are predicted. Each cell has two levels of chance: ``chance`` =
1/N for guesses among all positions; ``chance_excluding`` = 1/(N − kept positions) for guesses among
positions that are not shown.

An encoder that packs the visible patches into a square (Swin) is measured only at γ = 0 and .75.
For other methods that predict positions, γ and γ_pos are their ``mask_ratio`` and
``position_mask_ratio``; without one of them, a method is measured as trained. One that reads
further view groups gets views cropped as in training, not flipped.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from pospre.evaluation.estimates import Estimate, average, share, with_differences
from pospre.evaluation.isolated_method import ratios_of
from pospre.evaluation.position.predictions import Tally, tally_models, view_patches, weighed
from pospre.evaluation.position.settings import PositionGrid
from pospre.evaluation.registry import UNTRAINED, Context
from pospre.model.position_task import PositionObjective
from pospre.nn.masking import num_visible

NEEDS = PositionObjective
FIGURES = {"mean": "max"}
MASK_RATIOS = (0.0, 0.25, 0.5, 0.75)
POSITION_MASK_RATIOS = (0.25, 0.5, 0.75, 0.95)


def evaluate(context: Context, settings: PositionGrid) -> dict[str, Any]:
    """Measure the 16 cells (Swin: 8) and their mean.

    Returns:
        ``cells`` (one dict per cell, accuracies in [0, 1]), ``mean`` with its standard error over
        images (``mean_se``), ``initial_mean`` of the untrained model, ``mean_difference`` to it
        with its paired error, ``weighted_mean`` (None if temperature is null: the paper's is then
        ``mean``), ``grid`` (rows, columns) and ``samples``.
    """
    encoder = context.model.encoder
    packed = [each for each in MASK_RATIOS if encoder.takes(num_visible(encoder.num_patches, each))]
    rows = ratios_of(context.model, NEEDS, "mask_ratio", packed)
    columns = ratios_of(context.model, NEEDS, "position_mask_ratio", POSITION_MASK_RATIOS)
    cells = list(itertools.product(rows, columns))
    weigh = partial(weighed, context.model)
    counts = tally_models(context, settings, cells, prepare=weigh)
    return summarise(counts, encoder.grid, view_patches(context.model))


def summarise(
    counts: Tally, grid: tuple[int, int], view_patches: Sequence[int] = ()
) -> dict[str, Any]:
    """Turn counts by γ and γ_pos into the results (see ``evaluate``).

    ``view_patches`` are the numbers of patches in the views that the method reads.
    """
    num_patches = grid[0] * grid[1]
    cells: list[dict[str, Any]] = []
    measured: dict[str, list[Estimate]] = {}
    for (mask_ratio, position_mask_ratio), rows in counts.items():
        row = rows[""]
        samples, asked = len(row["asked"]), int(row["asked"].sum())
        visible, dropped = int(row["visible"].sum()) // samples, asked // samples
        kept = visible - dropped
        whole = min(each for each in view_patches or [num_patches] if each >= visible)
        hidden, lost = 1 - visible / whole, dropped / visible
        shares = {prefix: share(each["top1"], each["asked"]) for prefix, each in rows.items()}
        for prefix, each in shares.items():
            measured.setdefault(prefix, []).append(each)
        cells.append(
            {
                "mask_ratio": hidden if mask_ratio is None else mask_ratio,
                "position_mask_ratio": lost if position_mask_ratio is None else position_mask_ratio,
                "visible": visible,
                "kept": kept,
                "dropped": dropped,
                "accuracy": shares[""].value,
                "initial_accuracy": shares[UNTRAINED].value if UNTRAINED in shares else None,
                "weighted_accuracy": share(row["weighted"], row["weights"]).value
                if "weights" in row
                else None,
                "chance": 1 / num_patches,
                "chance_excluding": 1 / (num_patches - kept),
                "tokens": asked,
            }
        )
    means = {prefix: {"mean": average(each)} for prefix, each in measured.items()}
    weighted = [cell["weighted_accuracy"] for cell in cells]
    return {
        "cells": cells,
        **with_differences(means),
        "weighted_mean": None if None in weighted else fmean(weighted),
        "grid": list(grid),
        "samples": samples,
    }
