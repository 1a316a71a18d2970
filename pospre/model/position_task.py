"""Objectives that predict places, and their answers, which a watcher and evaluations read."""

import warnings
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.batch import Batch
from pospre.model.layout import Layout
from pospre.model.objective import Objective, Outputs
from pospre.nn.encoder_interface import PatchEncoder

REDRAWS = 32
_TINY = 1e-12  # of numbers without variance, R² is 0 where they are met


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

    @property
    def measure(self) -> str:
        """The name of ``score``."""
        return "accuracy"

    def right(self) -> Tensor:
        """Return which patches are predicted correctly: bool (R, K)."""
        return self.logits.detach().argmax(-1) == self.places

    def score(self, among: Tensor | None = None) -> Tensor:
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

    def chance(self) -> tuple[Tensor, Tensor]:
        """Return the score's mean and deviation for redrawn places; a view is one guess."""
        mean = torch.stack([self.redraw(number).score() for number in range(REDRAWS)]).mean()
        return mean, (mean * (1 - mean) / len(self.places)).sqrt()


class ViewAnswers(Answers):
    """Answers about patches of views that lie somewhere: R samples, K patches of their views.

    A place is a cell of the sample's reference view, or −1 outside of it. ``known`` are patches
    that were not encoded; nothing is asked of them. Slot k is the same patch of the views in all
    rows.
    """

    def redraw(self, number: int) -> "ViewAnswers":
        """Return the same predictions with the true places of other samples.

        What is hidden is where a whole view lies. Patches of one view are not exchanged: their
        order in it is known, and tells much of their places.
        """
        places = self.places[other_rows(self.places, number)]
        return self._replace(places=places, counted=~self.known & (places >= 0))


class Relations(NamedTuple):
    """An objective's predicted relations of P pairs, of views or patches, in each of R samples.

    Attributes:
        predicted: float32 (R, P, C), C numbers for each relation.
        true: float32 (R, P, C).
    """

    predicted: Tensor
    true: Tensor

    @property
    def measure(self) -> str:
        """The name of ``score``."""
        return "r2"

    def score(self, among: Tensor | None = None) -> Tensor:
        """Return R², the explained share of the variance of each number: (C,), 0 for no pair.

        Args:
            among: bool (R, P), the pairs that count; None: all.
        """
        predicted, true = self.predicted.detach().float(), self.true.float()
        counted = torch.ones_like(true[..., :1]) if among is None else among.unsqueeze(-1).float()
        pairs = counted.sum((0, 1)).clamp_min(1)
        centred = counted * (true - (counted * true).sum((0, 1)) / pairs)
        missed = (counted * (predicted - true)).square().sum((0, 1))
        return 1 - (missed + _TINY) / (centred.square().sum((0, 1)) + _TINY)

    def redraw(self, number: int) -> "Relations":
        """Return the same predictions with the true relations of other samples.

        The places that are related are drawn alike for all samples. Unless something tells them,
        those of another sample are as likely as the true ones.
        """
        return self._replace(true=self.true[other_rows(self.true, number)])

    def chance(self) -> tuple[Tensor, Tensor]:
        """Return the score's mean and standard deviation for redrawn relations, each (C,)."""
        scores = torch.stack([self.redraw(number).score() for number in range(REDRAWS)])
        return scores.mean(0), scores.std(0)


def other_rows(rows: Tensor, number: int) -> Tensor:
    """Return a random order (R,) of R rows; each ``number`` gives another."""
    first = torch.zeros(1, dtype=torch.int64, device=rows.device)
    return draws.permutation(draws.sample_keys(number, 0, first, 0, "redraw"), len(rows))[0]


class PlaceObjective(Objective):
    """An objective that predicts places which the encoder is not told.

    On images without content, its answers may be no better than ``chance``: runs watch this.
    """

    @abstractmethod
    def answers(self, outputs: Outputs, batch: Batch) -> Answers | Relations:
        """Return the predictions in ``forward``'s outputs."""

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the unweighted top-1 ``accuracy``, or the mean ``r2``."""
        answers = self.answers(outputs, batch)
        return {answers.measure: answers.score().mean()}


class PositionObjective(PlaceObjective):
    """An objective over the N positions of a grid. Evaluations only need ``answers``."""

    def __init__(self, encoder: PatchEncoder) -> None:
        super().__init__()
        self.num_prefix = encoder.num_prefix_tokens

    @abstractmethod
    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return the predictions in ``forward``'s outputs."""


def warn_of_unused_positions(name: str, layout: Layout, remedy: str = "none") -> None:
    """Warn if no pass with a gradient has places, because the method ``name`` hides all of them."""
    positions = layout.encoder.positions
    placed = [each for each in layout.passes.values() if each.has_grad and name not in each.places]
    if positions.can_forget and not placed:
        warnings.warn(
            f"{name} hides all places, so that encoder.positions = {positions.name} is never used "
            "in training: fine-tune the encoder, or read its features with positions=none. Or set "
            f"encoder.positions: {remedy}.",
            stacklevel=2,
        )
