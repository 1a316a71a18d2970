"""Similarity of predicted features to all patches, for I-JEPA or StoP (Bar et al. 2024, Fig. 6).

The encoder sees a context, and the predictor gets the hidden patches' positions without noise. The
map over the image is the softmax, at a temperature, of cosine similarities between a predicted
feature and the teacher's features of all patches. These are layer-normalised, as in training. It
shows whether the prediction resembles its own place, or similar content elsewhere.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre import draws
from pospre.algorithms.ijepa.blocks import draw_blocks
from pospre.algorithms.ijepa.ijepa import IJEPA, FeaturePrediction
from pospre.batch import INDEX, Batch
from pospre.evaluation.analysis.settings import PredictionHeatmaps
from pospre.evaluation.drawing import Cell, as_map, as_picture, save_groups
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.features import centre_batches
from pospre.evaluation.registry import Context
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass
from pospre.nn.grid import grid_distances

NEEDS = FeaturePrediction
FIGURES = {"distance": "max"}
IN_A_ROW = 3  # pictures


def evaluate(context: Context, settings: PredictionHeatmaps) -> dict[str, Any]:
    """Compare predicted features with those of all patches.

    Returns:
        Means over hidden patches and images, with standard errors over images (``…_se``):
        ``nearest``, the share of predictions most similar to the feature of their own place;
        ``distance``, in patches, from this place to the mean of the softmax; and
        ``uniform_distance``, the distance if all patches were alike.
    """
    model = context.model
    batches = centre_batches(context, settings)
    grid = model.encoder.grid
    distance_NN = grid_distances(*grid, squared=False).to(context.device)
    parts: list[Tensor] = []
    cells: list[list[Cell]] = []
    for batch in batches:
        batch = hide(model, batch, settings.seed)
        similarity_BQN = predicted_similarity(model, batch)
        target_BQ = batch["ijepa/targets"].flatten(1)
        weight_BQN = (similarity_BQN / settings.temperature).softmax(-1)
        away_BQN = distance_NN[target_BQ]
        nearest_BQ = similarity_BQN.argmax(-1) == target_BQ
        figures = [
            nearest_BQ.double().mean(1),
            (weight_BQN * away_BQN).sum(-1).double().mean(1),
            away_BQN.double().mean((1, 2)),
        ]
        parts.append(torch.stack(figures, dim=1).cpu())
        for row in range(min(len(target_BQ), settings.num_pictures - len(cells))):
            cells.append(_cells(batch, row, weight_BQN[row], grid))
    nearest, distance, uniform = torch.cat(parts).unbind(1)
    title = "which patches a predicted feature resembles (point: the patch it is of)"
    return {
        **mean_and_error("nearest", nearest),
        **mean_and_error("distance", distance),
        "uniform_distance": float(uniform.mean()),
        "grid": list(grid),
        "samples": len(nearest),
        "pictures": save_groups(cells, IN_A_ROW, context.folder, "prediction_heatmaps.png", title),
    }


def hide(model: PretrainModel, batch: Batch, seed: int) -> Batch:
    """Return a batch with a context and hidden blocks, with I-JEPA's default options."""
    # the name of a stream of draws, which tests/benchmarks measured
    keys_B = draws.sample_keys(seed, 0, batch[INDEX], 0, "stop_heatmaps")
    masks = draw_blocks(keys_B, IJEPA().blocks(model.encoder))
    return {**batch, "view/visible": masks.context, "ijepa/targets": masks.targets}


@torch.no_grad()
def predicted_similarity(model: PretrainModel, batch: Batch) -> Tensor:
    """Return the cosine (B, Q, N) of Q predicted features and all patches', after ``hide``."""
    objective, teacher = model.objectives.of(NEEDS), model.teacher
    assert teacher is not None
    images = model.images(batch)[:, 0]
    keep, context, every = batch["view/visible"], EncoderPass(visible="view/visible"), EncoderPass()
    seen = model.encoder(images, keep, model.pass_places(context, batch, keep))
    whole = teacher(images, places=model.pass_places(every, batch, None))
    predicted = objective({"student": seen, "teacher": whole}, batch)["predicted"]
    features_BND = whole[:, model.encoder.num_prefix_tokens :].float()
    features_BND = F.layer_norm(features_BND, features_BND.shape[-1:])
    return F.normalize(predicted.flatten(1, 2).float(), dim=-1) @ F.normalize(
        features_BND, dim=-1
    ).transpose(1, 2)


def _cells(batch: Batch, row: int, weight_QN: Tensor, grid: tuple[int, int]) -> list[Cell]:
    """Return the image without its first hidden block, and the map of one patch of this block."""
    block = batch["ijepa/targets"][row, 0].tolist()
    chosen = len(block) // 2
    view = as_picture(batch["view/image"][row, 0])
    hidden = view.copy()
    high, wide = view.shape[0] // grid[0], view.shape[1] // grid[1]
    for patch in block:
        top, left = patch // grid[1] * high, patch % grid[1] * wide
        hidden[top : top + high, left : left + wide] = 0
    heat = as_map(weight_QN[chosen], grid)
    mark = [block[chosen]]
    return [
        Cell(grid, image=hidden, marks=mark),
        Cell(grid, heat, view, marks=mark, colours="inferno"),
    ]
