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

from pospre.evaluation.isolated_method import ratios_of
from pospre.evaluation.position.predictions import TOP, Tally, tally_models, view_patches
from pospre.evaluation.position.settings import PatchPosition
from pospre.evaluation.registry import Context
from pospre.model.position_task import PositionObjective

NEEDS = PositionObjective
FIGURES = {"mean": "max"}


def evaluate(context: Context, settings: PatchPosition) -> dict[str, Any]:
    """Measure the accuracy at every mask ratio.

    Returns:
        ``ratios`` (one dict per η, accuracies in [0, 1]), ``mean`` (of their top-1), ``chance``,
        ``chance_top5``, ``grid`` (rows, columns) and ``samples``.
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
    for (ratio,), rows in counts.items():
        trained, initial = rows["trained"], rows.get("initial", {})
        accuracies = _accuracies(trained)
        untrained = {key: _accuracies(initial)[key] if initial else None for key in accuracies}
        context = int(trained["context"] / trained["images"])
        whole = min(each for each in view_patches or [patches] if each >= context)
        ratios.append(
            {
                "mask_ratio": 1 - context / whole if ratio is None else ratio,
                "context": context,
                **accuracies,
                **{f"initial_{key}": value for key, value in untrained.items()},
                "patches": int(trained["asked"]),
            }
        )
    asked = [row["top1"] for row in ratios if row["top1"] is not None]
    return {
        "ratios": ratios,
        "mean": sum(asked) / len(asked) if asked else None,
        "chance": 1 / patches,
        "chance_top5": min(TOP / patches, 1.0),
        "grid": list(grid),
        "samples": int(next(iter(counts.values()))["trained"]["images"]),
    }


def _accuracies(row: Mapping[str, float]) -> dict[str, float | None]:
    """Return a model's accuracies; None if no patch counts."""
    others = row["asked"] - row["asked_context"]
    return {
        "top1": _share(row["top1"], row["asked"]),
        "top5": _share(row["top5"], row["asked"]),
        "context_top1": _share(row["top1_context"], row["asked_context"]),
        "masked_top1": _share(row["top1"] - row["top1_context"], others),
    }


def _share(right: float, asked: float) -> float | None:
    return right / asked if asked else None
