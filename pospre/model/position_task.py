"""Objectives that predict positions, and their answers, which evaluations read."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.batch import Batch
from pospre.model.objective import Objective, Outputs
from pospre.nn.encoder_interface import PatchEncoder


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
        accuracies = [self.redraw(number).accuracy() for number in range(times)]
        return torch.stack(accuracies).mean()


class PositionObjective(Objective):
    """An objective over the N positions of a grid. Evaluations only need ``answers``."""

    def __init__(self, encoder: PatchEncoder) -> None:
        super().__init__()
        self.num_prefix = encoder.num_prefix_tokens

    @abstractmethod
    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return the predictions in ``forward``'s outputs."""

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the unweighted top-1 ``accuracy``."""
        return {"accuracy": self.answers(outputs, batch).accuracy()}
