"""Run one method of a model in isolation, with other options."""

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from pospre.batch import Batch
from pospre.data.views.augment_options import Augment
from pospre.data.views.options import ViewGroup
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs


def takes(method: type[PretrainAlgorithm], option: str) -> bool:
    """Return whether a method has this option."""
    return option in signature(method).parameters


def method_in(model: PretrainModel, kind: type) -> PretrainAlgorithm:
    """Return the first algorithm of a model whose objective is a ``kind``."""
    return next(each for each in model.algorithms if each.offers(kind))


def ratios_of(
    model: PretrainModel, kind: type, option: str, ratios: Sequence[float]
) -> list[float | None]:
    """Return the ratios to measure at; one None where the method has no such option."""
    return [*ratios] if takes(type(method_in(model, kind)), option) else [None]


def views_of(model: PretrainModel, kind: type) -> dict[str, ViewGroup] | None:
    """Return the view groups that a method with a ``kind`` as objective reads; None: one ``view``.

    They are cropped as in training, but neither mirrored nor changed. Of a method that reads only
    one ``view``, evaluations take the centre instead.
    """
    uses = method_in(model, kind).uses(model.encoder)
    read = {group for group in uses.groups if group in model.views}
    if read == {"view"} and (uses.views["view"] or 1) == 1:
        return None
    outer = {model.views[name].inside for name in read}
    return {
        name: replace(group, flip_rate=0.0, augment=Augment())
        for name, group in model.views.items()
        if name in read | outer
    }


class IsolatedMethod:
    """A method of a model in isolation, with the trained weights.

    ``kind`` is the class of its objective. ``options`` replace the trained ones when it attaches
    and draws; those that it lacks are ignored. Trained modules are shared, not created again.
    """

    def __init__(self, model: PretrainModel, kind: type, *, seed: int, **options: Any) -> None:
        trained: Any = method_in(model, kind)
        known = {key: value for key, value in options.items() if takes(type(trained), key)}
        self.method: PretrainAlgorithm = replace(trained, **known)
        self.name = self.method.module_name()
        with torch.device("meta"):
            self.model = PretrainModel(
                model.encoder, [self.method], seed=seed, views=views_of(model, kind)
            )
        self.model.objectives.named[self.name] = model.objectives[self.name]
        self.model.contents, self.model.places = model.contents, model.places
        self.model.augment = model.augment
        self.model.train(model.training)

    @property
    def groups(self) -> set[str]:
        """The view groups of the passes that its objective reads."""
        return {laid.group for laid in self.model.layout.passes.values()}

    def draw(self, batch: Batch) -> Batch:
        """Return the batch with the keys that the method writes."""
        return self.model.draw(dict(batch))

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Outputs:
        """Return the outputs of the objective's ``forward``."""
        return self.model(batch)[self.name]
