"""What methods that classify positions share: DropPos's two relaxations of the task.

Labels are smoothed over neighbouring positions with a width that may shrink over training, and
every patch may be weighted by its similarity to the class token (Wang et al. 2023, Sec. 3.2).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from pospre import draws
from pospre.batch import Batch
from pospre.model.algorithm import PretrainAlgorithm, Progress
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs, Predicts
from pospre.nn.grid import grid_distances, smoothed_labels
from pospre.nn.vit import Encoder
from pospre.schedules import linear

Distance = Literal["squared", "euclid"]


class Answers(NamedTuple):
    """Where an objective puts K patches of each of R views.

    Attributes:
        logits: (R, K, N), over the positions of the grid.
        places: int64 (R, K), where the patches are.
        told: bool (R, K), those whose place the encoder is told.
        counted: bool (R, K), those that count in the accuracy of the training.
    """

    logits: Tensor
    places: Tensor
    told: Tensor
    counted: Tensor

    def right(self) -> Tensor:
        """Return which patches are put in their place: bool (R, K)."""
        return self.logits.detach().argmax(-1) == self.places

    def accuracy(self, among: Tensor | None = None) -> Tensor:
        """Return the share of right answers of those that count, and are ``among`` these."""
        counted = self.counted if among is None else self.counted & among
        return (self.right() & counted).sum() / counted.sum().clamp_min(1)

    def redraw(self, number: int) -> "Answers":
        """Return the same answers to places that are drawn anew, given all that was told.

        The patches of a view that are not told their place exchange it. As long as nothing tells
        them apart, every order is as likely as the true one, so that answers which find the true
        one more often have read it somewhere.

        Args:
            number: of the draw; another one is another order.
        """
        rows, count = self.places.shape
        views = torch.arange(rows, device=self.places.device)
        draw = draws.uniform(draws.sample_keys(number, 0, views, 0, "redraw"), count)
        turn = draw.masked_fill(self.told, 2.0).argsort(dim=1, stable=True)
        slots = self.told.byte().argsort(dim=1, stable=True)
        places = torch.scatter(self.places, 1, slots, self.places.gather(1, turn))
        return self._replace(places=places)

    def chance(self, times: int = 32) -> Tensor:
        """Return the mean accuracy of these answers to so many ``redraw``s."""
        found = [self.redraw(number).accuracy() for number in range(times)]
        return torch.stack(found).mean()


@dataclass(kw_only=True, eq=False)
class PositionTask(PretrainAlgorithm):
    """A method that classifies positions, with the relaxations that DropPos has found.

    Args:
        sigma_start: σ0, width of the label smoothing at the start, in patches; 0 is one-hot.
        sigma_end: σT, its width at the end; the change is linear in steps.
        distance: in the smoothing's exponent, ``squared`` Euclidean (DropPos's code) or ``euclid``
            (its Eq. 5).
        temperature: τ of the attentive weights; None weighs all patches alike. As published, the
            weights are normalised over what one forward pass sees, so that the loss depends
            (slightly) on the microbatch size and the number of ranks.
        weight: factor of this loss in the total.
    """

    sigma_start: NonNegativeFloat = 0.0
    sigma_end: NonNegativeFloat = 0.0
    distance: Distance = "squared"
    temperature: PositiveFloat | None = None
    weight: NonNegativeFloat = 1.0

    def couples_samples(self) -> str | None:
        """Return what looks at all samples of a forward at once."""
        return None if self.temperature is None else "the weights of patches"

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set σ, the width of the label smoothing."""
        sigma = linear(self.sigma_start, self.sigma_end, progress.step)
        model.objectives.find(PositionObjective)[1].sigma.fill_(sigma)


class PositionObjective(Objective):
    """An objective over the N positions of the encoder's grid, with smoothed labels.

    What ``answers`` returns is all that the evaluations of positions ask of it.

    Args:
        encoder: whose grid and class token it is about.
        options: of the method; None: labels are one-hot, and weights alike.
    """

    predicts: ClassVar[Predicts | None] = "places"

    def __init__(self, encoder: Encoder, options: PositionTask | None = None) -> None:
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
        """Return the soft target of every position at today's width: (N, N)."""
        return smoothed_labels(self.distance_NN, self.sigma, official=official)

    @abstractmethod
    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return what ``forward``'s outputs say about which patches."""

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the unweighted top-1 ``accuracy``."""
        return {"accuracy": self.answers(outputs, batch).accuracy()}

    def attentive_weights(self, tokens: Tensor, visible_BK: Tensor | None = None) -> Tensor:
        """Return the share of each patch in the image's meaning (Eq. 9): (B, K), sum 1.

        The published code takes the softmax over all patches and renormalises it over the visible
        ones, which is the softmax over the visible ones.

        Args:
            tokens: (B, P+N, D) of a pass; no gradient goes there.
            visible_BK: the patches among them that are weighed; None: all.
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
