"""Where a model puts the patches of images, at any mask ratio: for the evaluations of positions."""

from typing import NamedTuple

import torch
from torch import Tensor

from pospre.batch import Batch, per_row
from pospre.evaluation.alone import Alone
from pospre.model.model import PretrainModel
from pospre.model.position_task import PositionObjective
from pospre.nn.masking import slot_mask


class Placed(NamedTuple):
    """Where K patches of each image are put.

    Attributes:
        logits: (B, K, N), over the positions of the grid.
        places: int64 (B, K), where they are.
        asked: bool (B, K), those that are not told their place.
        context: bool (B, K), those that give keys and values.
    """

    logits: Tensor
    places: Tensor
    asked: Tensor
    context: Tensor


class Placer:
    """Puts patches in their places, by any method whose objective is a ``PositionObjective``.

    A model trained on one of every 2×2 patches (``sampling: uniform``) sees those at γ = .75.

    Args:
        model: the trained model.
        seed: of the masks.
    """

    def __init__(self, model: PretrainModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self._made: dict[tuple[float | None, float | None], Alone] = {}

    def __call__(
        self,
        batch: Batch,
        mask_ratio: float | None = None,
        position_mask_ratio: float | None = None,
    ) -> Placed:
        """Return the places that are found at these ratios; None: those of the training.

        Args:
            batch: images with ``index`` and ``epoch``.
            mask_ratio: γ of DropPos, η of MP3.
            position_mask_ratio: γ_pos.
        """
        key = mask_ratio, position_mask_ratio
        if key not in self._made:
            self._made[key] = self._ask(*key)
        alone = self._made[key]
        batch = alone.draw(batch)
        objective = alone.model.objectives[alone.name]
        assert isinstance(objective, PositionObjective)
        logits, places, told, _ = objective.answers(alone.outputs(batch), batch)
        context = torch.ones_like(told)
        for declared in alone.model.registry.passes.values():
            if declared.context is not None:
                context = slot_mask(per_row(batch[declared.context], len(told)), told.shape[1])
        return Placed(logits, places, ~told, context)

    def _ask(self, mask_ratio: float | None, position_mask_ratio: float | None) -> Alone:
        options = {"mask_ratio": mask_ratio, "position_mask_ratio": position_mask_ratio}
        given = {key: ratio for key, ratio in options.items() if ratio is not None}
        plain = {} if mask_ratio in (None, 0.75) else {"sampling": "random"}
        # attentive weights are of the loss
        return Alone(
            self.model, PositionObjective, seed=self.seed, temperature=None, **given, **plain
        )


@torch.no_grad()
def patch_weights(model: PretrainModel, batch: Batch) -> Tensor | None:
    """Return the attentive weight of every patch (B, N), as DropPos's loss has them as published.

    Those of the whole image, with all positions, in the trained encoder; None where the recipe
    trains without (``temperature: null``).
    """
    _, objective = model.objectives.find(PositionObjective)
    if objective.temperature is None:
        return None
    return objective.attentive_weights(model.tokens(model.images(batch).flatten(0, 1)))
