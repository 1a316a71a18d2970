"""An encoder that was given other positions, beside the original and its removal of position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.batch import Batch
from pospre.errors import UserError
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.paired import Paired
from pospre.evaluation.position.layer_features import hold_out, layer_features
from pospre.evaluation.position.settings import PositionRemoval
from pospre.evaluation.registry import OVER, Context, evaluate_by_name, figures_of
from pospre.evaluation.verdict import Measured, of_figures, turned
from pospre.model.model import PretrainModel

BEFORE, AFTER, ADAPTED = "before", "after", "adapted"
"""Names of the original, of the original after the removal, and of the adapted encoder."""
PROBES = "r2", "top1"
_FEW = 8  # images that are shifted around


def original_of(context: Context) -> PretrainModel:
    """Return the start, or the model without one; ``UserError`` if their tokens do not match."""
    if context.start is None:
        return context.model
    start = context.start()
    theirs, own = map(_described, (start, context.model))
    if theirs != own:
        raise UserError(
            f"--start gives {theirs} and --model {own}, so they cannot be compared one by one. "
            "Give as --start the weights that its training started from, or leave it out."
        )
    return start


def _described(model: PretrainModel) -> str:
    rows, columns = model.encoder.grid
    return f"{rows}×{columns} tokens of {model.encoder.embed_dim} numbers"


def compared(context: Context, models: Mapping[str, PretrainModel], name: str) -> dict[str, Any]:
    """Return the results of another evaluation after the removal, compared with other models'."""
    settings, opened, data = context.opened[name]
    alone = replace(
        context,
        model=models[AFTER],
        start=None,
        others={f"{key}_": model for key, model in models.items() if key != AFTER},
        data=data,
        folder=None,
        opened=opened,
    )
    return evaluate_by_name(name, alone, settings)


def compared_figures(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the figures of an evaluation that its data give."""
    return [figure for figure in figures_of(name) if results.get(figure) is not None]


def figure_rows(
    name: str, results: Mapping[str, Any], models: Mapping[str, PretrainModel]
) -> list[dict[str, Any]]:
    """Return the figures of another evaluation beside those of other models."""
    rows = []
    for figure in compared_figures(name, results):
        for other in (key for key in models if key != AFTER):
            paired = Paired.model_validate(results[f"{figure}{OVER}{other}"])
            value = {
                "after": results[figure],
                "beside": other,
                "value": results[f"{other}_{figure}"],
            }
            gain = {"difference": paired.difference, **interval(paired), "p": paired.p}
            rows.append({"evaluation": name, "figure": figure, **value, **gain})
    return rows


def left(figures: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return the probes' figures, with errors, under the names of results."""
    ends = ("", "_se")
    return {f"{prefix}{key}_left{end}": figures[f"{key}{end}"] for key in PROBES for end in ends}


def interval(paired: Paired) -> dict[str, float | None]:
    """Return the middle 95 % over samples of the images as ``low`` and ``high``."""
    low, high = paired.bootstrap or (None, None)
    return {"low": low, "high": high}


def encoder_rows(
    context: Context,
    models: Mapping[str, PretrainModel],
    probed: Mapping[str, Mapping[str, float]],
    batch: Batch,
    settings: PositionRemoval,
) -> list[dict[str, Any]]:
    """Return a row for each model: its probes' figures, ``cosine`` and ``roll_error``.

    ``cosine`` is the mean over tokens to those of the first model, on the held-out images.
    """
    _, asked = hold_out(batch, settings.seed)
    few = {key: value[:_FEW].to(context.device) for key, value in asked.items()}
    rows: list[dict[str, Any]] = []
    original_BTD: Tensor | None = None
    for name, model in models.items():
        depth = [model.encoder.depth]
        (tokens_BTD,) = layer_features(context, model, asked, depth, "image", settings).tokens
        original_BTD = tokens_BTD if original_BTD is None else original_BTD
        near = mean_and_error("cosine", F.cosine_similarity(tokens_BTD, original_BTD, -1).mean(1))
        told = {key: probed[name][key] for kind in PROBES for key in (kind, f"{kind}_se")}
        rows.append({"encoder": name, **told, **near, "roll_error": roll_error(model, few)})
    return rows


@torch.no_grad()
def roll_error(model: PretrainModel, batch: Batch) -> float:
    """Return how far tokens are from moving with images that are shifted around by half the grid.

    It is the largest difference of a number, in standard deviations of all numbers. Encoders
    without absolute places only have rounding errors, below 1e-4.
    """
    encoder, prefix = model.encoder, model.encoder.num_prefix_tokens
    images_BCHW = model.images(batch)[:, 0]
    steps = [side // 2 for side in encoder.grid]
    cells = zip(steps, images_BCHW.shape[2:], encoder.grid, strict=True)
    pixels = [step * (side // count) for step, side, count in cells]
    tokens_BKD = encoder(images_BCHW).float()
    moved_BKD = encoder(images_BCHW.roll(pixels, (2, 3))).float()
    map_BHWD = tokens_BKD[:, prefix:].unflatten(1, encoder.grid)
    patches_BND = map_BHWD.roll(steps, (1, 2)).flatten(1, 2)
    wanted_BKD = torch.cat([tokens_BKD[:, :prefix], patches_BND], dim=1)
    return float((moved_BKD - wanted_BKD).abs().max() / tokens_BKD.std())


def verdict_on(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Say whether the adapted encoder is better than the removal, by the rule of a run's verdict.

    ``found`` are results of the removal beside the adapted encoder, by evaluation. The first figure
    of the first one is judged, the others guard it.
    """
    measured = [
        _measured(name, figure, results)
        for name, results in found.items()
        for figure in compared_figures(name, results)
    ]
    if not measured:
        return (
            "Nothing here says whether it is better than removal; give evaluations=knn or others."
        )
    keep = "Keep removal."
    return of_figures(measured, "The adapted encoder's", "removal from the start", keep).sentence


def _measured(name: str, figure: str, results: Mapping[str, Any]) -> Measured:
    paired = Paired.model_validate(results[f"{figure}{OVER}{ADAPTED}"])  # removal minus adapted
    if figures_of(name)[figure] == "max":
        paired = turned(paired)
    return Measured(f"{name}/{figure}", results[f"{ADAPTED}_{figure}"], results[figure], paired)
