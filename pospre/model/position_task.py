"""Common code of methods that classify positions: DropPos's two relaxations of the task.

Labels are smoothed over neighbouring positions, with a width that may shrink during training.
Patches may be weighted by their similarity to the class token (Wang et al. 2023, Sec. 3.2).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from pospre import draws
from pospre.batch import Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.progress import Progress
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.grid import grid_distances, smoothed_labels
from pospre.schedules import linear

Distance = Literal["squared", "euclid"]


class Answers(NamedTuple):
    """An objective's predicted positions of K patches in each of R views.

    Attributes:
        logits: (R, K, N), over the positions of the grid.
        places: int64 (R, K), the true positions.
        known: bool (R, K), patches whose place the encoder gets.
        counted: bool (R, K), patches that count in training accuracy.
    """

    logits: Tensor
    places: Tensor
    known: Tensor
    counted: Tensor

    def right(self) -> Tensor:
        """Return which patches are predicted correctly: bool (R, K)."""
        return self.logits.detach().argmax(-1) == self.places

    def accuracy(self, among: Tensor | None = None) -> Tensor:
        """Return the accuracy over the counted patches, or those that are also ``among`` these."""
        counted = self.counted if among is None else self.counted & among
        return (self.right() & counted).sum() / counted.sum().clamp_min(1)

    def redraw(self, number: int) -> "Answers":
        """Return the same predictions with redrawn true places, given all known places.

        Patches of a view whose places are hidden exchange them. Unless something distinguishes
        them, every order is as likely as the true one. Predictions that match the true order more
        often must have used a leak.

        Args:
            number: number of the draw; each gives another order.
        """
        rows, count = self.places.shape
        views = torch.arange(rows, device=self.places.device)
        draw = draws.uniform(draws.sample_keys(number, 0, views, 0, "redraw"), count)
        turn = draw.masked_fill(self.known, 2.0).argsort(dim=1, stable=True)
        slots = self.known.byte().argsort(dim=1, stable=True)
        places = torch.scatter(self.places, 1, slots, self.places.gather(1, turn))
        return self._replace(places=places)

    def chance(self, times: int = 32) -> Tensor:
        """Return the mean accuracy of these predictions over this many ``redraw``s."""
        found = [self.redraw(number).accuracy() for number in range(times)]
        return torch.stack(found).mean()


@dataclass(kw_only=True, eq=False)
class PositionTask(PretrainAlgorithm):
    """A method that classifies positions, with DropPos's relaxations.

    Args:
        sigma_start: σ0, initial width of the label smoothing, in patches; 0 is one-hot.
        sigma_end: σT, final width; it changes linearly in steps.
        distance: distance in the smoothing's exponent: ``squared`` (DropPos's code) or ``euclid``
            (its Eq. 5).
        temperature: τ of the attentive weights; None: equal weights. As published, weights are
            normalised within one forward pass, so the loss depends slightly on the microbatch
            size and the number of ranks.
        weight: factor of this loss in the total.
    """

    sigma_start: NonNegativeFloat = 0.0
    sigma_end: NonNegativeFloat = 0.0
    distance: Distance = "squared"
    temperature: PositiveFloat | None = None
    weight: NonNegativeFloat = 1.0

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set σ, the width of the label smoothing."""
        sigma = linear(self.sigma_start, self.sigma_end, progress.step)
        objective = model.objectives[self.module_name()]
        assert isinstance(objective, PositionObjective)
        objective.sigma.fill_(sigma)


class PositionObjective(Objective):
    """An objective over the N positions of the encoder's grid, with smoothed labels.

    Position evaluations only need ``answers``.

    Args:
        encoder: its grid and class token are used.
        options: of the method; None: one-hot labels and equal weights.
    """

    def __init__(self, encoder: PatchEncoder, options: PositionTask | None = None) -> None:
        super().__init__()
        given = PositionTask if options is None else options  # the class has the defaults
        self.num_prefix, self.temperature = encoder.num_prefix_tokens, given.temperature
        self.weight = given.weight
        self.sigma: Tensor
        self.distance_NN: Tensor
        self.register_buffer("sigma", torch.tensor(given.sigma_start), persistent=False)
        distance_NN = grid_distances(*encoder.grid, squared=given.distance == "squared")
        self.register_buffer("distance_NN", distance_NN, persistent=False)

    def targets(self, *, official: bool = False) -> Tensor:
        """Return the soft target of every position at the current width: (N, N)."""
        return smoothed_labels(self.distance_NN, self.sigma, official=official)

    @abstractmethod
    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return the predictions in ``forward``'s outputs."""

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the unweighted top-1 ``accuracy``."""
        return {"accuracy": self.answers(outputs, batch).accuracy()}

    def attentive_weights(self, tokens: Tensor, visible_BK: Tensor | None = None) -> Tensor:
        """Return each patch's share of the image's meaning (Eq. 9): (B, K), sum 1.

        The published code takes the softmax over all patches and renormalises over the visible
        ones, which equals the softmax over the visible ones.

        Args:
            tokens: (B, P+N, D) of a pass; they get no gradient.
            visible_BK: the patches to weight; None: all.
        """
        assert self.temperature is not None
        tokens = tokens.detach().float()
        similarity = F.cosine_similarity(tokens[:, :1], tokens[:, self.num_prefix :], dim=-1)
        if visible_BK is not None:
            similarity = torch.gather(similarity, 1, visible_BK)
        return torch.softmax(similarity / self.temperature, dim=-1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w·v / Σ w (Eq. 8); 0 if all weights are 0."""
    return (weights * values).sum() / weights.sum().clamp_min(1e-12)
