"""Predicted positions of patches at any mask ratio, for the position evaluations."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pospre.algorithms.droppos import RelaxedPositions
from pospre.batch import Batch, per_row
from pospre.evaluation.features import centre_batches
from pospre.evaluation.isolated_method import IsolatedMethod, views_of
from pospre.evaluation.position.settings import PatchPosition, PositionGrid
from pospre.evaluation.registry import Context
from pospre.model.model import PretrainModel
from pospre.model.position_task import PositionObjective
from pospre.nn.masking import slot_mask


class Placed(NamedTuple):
    """Predicted positions of K patches of each image.

    Attributes:
        logits: (B, K, N), over the positions of the grid.
        places: int64 (B, K), the true positions.
        asked: bool (B, K), patches whose position is not given.
        context: bool (B, K), patches that give keys and values.
    """

    logits: Tensor
    places: Tensor
    asked: Tensor
    context: Tensor


Ratios = tuple[float | None, ...]
Predictor = Callable[..., Placed]
Tally = dict[Ratios, dict[str, dict[str, Tensor]]]
TOP = 5
WEIGHT = "weight"
"""Batch key of the patches' weights, (B, N)."""


class Placer:
    """Predicts positions with any method whose objective is a ``PositionObjective``.

    A model trained on one of every 2×2 patches (``sampling: uniform``) gets these at γ = .75. A
    batch needs ``views_of`` the model.
    """

    def __init__(self, model: PretrainModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self._made: dict[tuple[float | None, float | None], IsolatedMethod] = {}

    def __call__(
        self,
        batch: Batch,
        mask_ratio: float | None = None,
        position_mask_ratio: float | None = None,
    ) -> Placed:
        """Return the predictions at ratios γ (η of MP3) and γ_pos; None: those of the training."""
        key = mask_ratio, position_mask_ratio
        if key not in self._made:
            self._made[key] = self._ask(*key)
        alone = self._made[key]
        batch = alone.draw(batch)
        objective = alone.model.objectives[alone.name]
        assert isinstance(objective, PositionObjective)
        logits, places, known, _ = objective.answers(alone.outputs(batch), batch)
        context = torch.ones_like(known)
        for declared in alone.model.layout.passes.values():
            if declared.context is not None:
                context = slot_mask(per_row(batch[declared.context], len(known)), known.shape[1])
        return Placed(logits, places, ~known, context)

    def _ask(self, mask_ratio: float | None, position_mask_ratio: float | None) -> IsolatedMethod:
        options = {"mask_ratio": mask_ratio, "position_mask_ratio": position_mask_ratio}
        given = {key: ratio for key, ratio in options.items() if ratio is not None}
        plain = {} if mask_ratio in (None, 0.75) else {"sampling": "random"}
        # attentive weights only matter for the loss
        return IsolatedMethod(
            self.model, PositionObjective, seed=self.seed, temperature=None, **given, **plain
        )


@torch.no_grad()
def weighed(model: PretrainModel, batch: Batch) -> Batch:
    """Return a batch with the attentive weight of every patch, as in DropPos's published loss.

    Methods that read further view groups are not weighted.

    They come from the whole image, with all positions, in the trained encoder. A recipe may train
    without them (``temperature: null``); then there are none.
    """
    objective = model.objectives.of(PositionObjective)
    is_weighted = isinstance(objective, RelaxedPositions) and objective.temperature is not None
    if not is_weighted or views_of(model, PositionObjective) is not None:
        return batch
    tokens = model.encoder(model.images(batch).flatten(0, 1))
    return {**batch, WEIGHT: objective.attentive_weights(tokens)}


def tally_models(
    context: Context,
    settings: PatchPosition | PositionGrid,
    cells: Sequence[Ratios],
    *,
    prepare: Callable[[Batch], Batch] = dict,
) -> Tally:
    """Count over the measured images for the trained model and, if asked for, the untrained one."""
    models = context.models(baseline=settings.baseline)
    predictors = {prefix: Placer(model, settings.seed) for prefix, model in models.items()}
    views = views_of(context.model, PositionObjective)
    batches = centre_batches(context, settings, view=views)
    return tally(predictors, map(prepare, batches), cells)


def view_patches(model: PretrainModel) -> list[int]:
    """Return the number of patches in a view of each group that the method reads."""
    views = views_of(model, PositionObjective)
    if views is None:
        return [model.encoder.num_patches]
    return [math.prod(model.encoder.grid_of(*group.shape)) for group in views.values()]


def tally(
    predictors: Mapping[str, Predictor], batches: Iterable[Batch], cells: Sequence[Ratios]
) -> Tally:
    """Count predicted and correct patches over images, optionally ``weighed``, by cell of ratios.

    Returns:
        By cell, then by predictor, for every image (M,): the numbers of patches ``visible``, in the
        ``context``, ``asked`` and ``asked_context``, and of correct ones, ``top1``, ``top5`` and
        ``top1_context``. For weighed images also the ``weights`` of predicted patches, and the
        ``weighted`` sum of correct ones, as shares of each image's visible patches.
    """
    parts: dict[Ratios, dict[str, dict[str, list[Tensor]]]] = {
        cell: {name: {} for name in predictors} for cell in cells
    }
    for batch in batches:
        for cell, (name, predict) in itertools.product(cells, predictors.items()):
            for key, counts_B in _count(predict(batch, *cell), batch.get(WEIGHT)).items():
                parts[cell][name].setdefault(key, []).append(counts_B)
    return {
        cell: {
            name: {key: torch.cat(counts).cpu() for key, counts in row.items()}
            for name, row in rows.items()
        }
        for cell, rows in parts.items()
    }


def _count(placed: Placed, weight_BN: Tensor | None) -> dict[str, Tensor]:
    best_BKT = placed.logits.topk(min(TOP, placed.logits.shape[-1]), dim=-1).indices
    right_BKT = (best_BKT == placed.places.unsqueeze(-1)) & placed.asked.unsqueeze(-1)
    first_BK = right_BKT[..., 0]
    counts = {
        "visible": torch.ones_like(placed.places).sum(1),
        "context": placed.context.sum(1),
        "asked": placed.asked.sum(1),
        "asked_context": (placed.asked & placed.context).sum(1),
        "top1": first_BK.sum(1),
        "top5": right_BKT.any(-1).sum(1),
        "top1_context": (first_BK & placed.context).sum(1),
    }
    if weight_BN is not None:
        weight_BK = weight_BN.double().gather(1, placed.places)
        weight_BK = weight_BK / weight_BK.sum(1, keepdim=True)
        counts["weights"] = (weight_BK * placed.asked).sum(1)
        counts["weighted"] = (weight_BK * first_BK).sum(1)
    return counts
