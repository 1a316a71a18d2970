"""Position accuracy by mask ratio, as in MP3 (Zhai et al. 2022, Fig. 3).

MP3's model sees all patches without positions; a share η of them gives no keys and values. It
measures top-1 and top-5 over all patches of all images, and top-1 over the context and over the
other patches. The context is seeded per image, so two models get the same one; centre view, no
flip. Chance is 1/N and 5/N. Patches whose position is given are not counted. For other methods that
predict positions, the ratio is their ``mask_ratio``; methods without it are measured as trained.
One that reads further view groups gets views cropped as in training, not flipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pospre.evaluation.estimates import Estimate, average, share, with_differences
from pospre.evaluation.isolated_method import ratios_of
from pospre.evaluation.position.predictions import TOP, Tally, tally_models, view_patches
from pospre.evaluation.position.settings import PatchPosition
from pospre.evaluation.registry import UNTRAINED, Context
from pospre.model.position_task import PositionObjective

NEEDS = PositionObjective
FIGURES = {"mean": "max"}
Accuracies = dict[str, Estimate | None]


def evaluate(context: Context, settings: PatchPosition) -> dict[str, Any]:
    """Measure the accuracy at every mask ratio.

    Returns:
        ``ratios`` (one dict per η, accuracies in [0, 1]), ``mean`` (of their top-1) with its
        standard error over images (``mean_se``), ``initial_mean`` of the untrained model,
        ``mean_difference`` to it with its paired error, ``chance``, ``chance_top5``, ``grid``
        (rows, columns) and ``samples``.
    """
    ratios = ratios_of(context.model, NEEDS, "mask_ratio", settings.mask_ratios)
    cells = [(ratio,) for ratio in ratios]
    counts = tally_models(context, settings, cells)
    return summarise(counts, context.model.encoder.grid, view_patches(context.model))


def summarise(
    counts: Tally, grid: tuple[int, int], view_patches: Sequence[int] = ()
) -> dict[str, Any]:
    """Turn counts by ratio into the results (see ``evaluate``).

    ``view_patches`` are the numbers of patches in the views that the method reads.
    """
    patches = grid[0] * grid[1]
    ratios: list[dict[str, Any]] = []
    measured: dict[str, list[Estimate]] = {}
    for (ratio,), rows in counts.items():
        accuracies = {prefix: _accuracies(row) for prefix, row in rows.items()}
        for prefix, figures in accuracies.items():
            if figures["top1"] is not None:
                measured.setdefault(prefix, []).append(figures["top1"])
        nothing: Accuracies = dict.fromkeys(accuracies[""])
        asked_M = rows[""]["asked"]
        context = int(rows[""]["context"].sum()) // len(asked_M)
        whole = min(each for each in view_patches or [patches] if each >= context)
        ratios.append(
            {
                "mask_ratio": 1 - context / whole if ratio is None else ratio,
                "context": context,
                **{
                    f"{prefix}{key}": estimate and estimate.value
                    for prefix in ("", UNTRAINED)
                    for key, estimate in accuracies.get(prefix, nothing).items()
                },
                "patches": int(asked_M.sum()),
            }
        )
    means = {prefix: {"mean": average(each)} for prefix, each in measured.items()}
    return {
        "ratios": ratios,
        **(with_differences(means) if means else dict.fromkeys(("mean", f"{UNTRAINED}mean"))),
        "chance": 1 / patches,
        "chance_top5": min(TOP / patches, 1.0),
        "grid": list(grid),
        "samples": len(asked_M),
    }


def _accuracies(row: Mapping[str, Tensor]) -> Accuracies:
    """Return a model's accuracies; None if no patch counts."""
    others = row["asked"] - row["asked_context"]
    return {
        "top1": _share(row["top1"], row["asked"]),
        "top5": _share(row["top5"], row["asked"]),
        "context_top1": _share(row["top1_context"], row["asked_context"]),
        "masked_top1": _share(row["top1"] - row["top1_context"], others),
    }


def _share(right_M: Tensor, asked_M: Tensor) -> Estimate | None:
    return share(right_M, asked_M) if asked_M.any() else None
