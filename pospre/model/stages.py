"""Stages of a training: which tensors train when, and how the rate of new ones rises.

A frozen tensor has no gradient. So it does not move, not even by weight decay, has no moments, and
does not count for the norm by which gradients are clipped. When it begins to train, it gets new
moments, and its rate rises to the others' over a ramp.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from pospre.arguments import Section, validated
from pospre.command_line import spelled
from pospre.errors import UserError
from pospre.model.algorithm import unwrapped
from pospre.model.model import PretrainModel
from pospre.model.stage_times import StageTimes
from pospre.nn.lora import PAIRS
from pospre.nn.sizes import pair
from pospre.recipe.sections import Stage, Trained


class _Given(Section):
    stages: Annotated[tuple[Stage, ...], Field(strict=False)]


class Stages(StageTimes):
    """The stages of a training in steps, and the names of the tensors that train in each.

    Args:
        model: with its algorithms, and everything that is to train at some time not frozen.
        stages: as the section ``stages`` of a recipe: ``[{"until": 0.15, "train": "heads"},
            {"until": "500ba", "train": {"last": 4}}, {"train": "all"}]``.
        total_steps: of the whole training.
        steps_per_epoch: for durations in epochs.
        batch_size: over all ranks, for durations in samples.
        fresh: timm's names of tensors of the encoder that the start did not give; they count as
            heads.
        passed: first steps of the stages that an earlier start of the same training has entered.

    Attributes:
        starts: the first step of every stage, counted from 0.
        trained: the names of the tensors that train, for every stage.

    Raises:
        UserError: a stage has no step, trains nothing or the same as the one before, or an option
            is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage | Mapping[str, Any]],
        *,
        total_steps: int,
        steps_per_epoch: int,
        batch_size: int,
        fresh: Collection[str] = (),
        passed: Sequence[int] = (),
    ) -> None:
        options = validated(_Given, {"stages": [*stages]}, "Stages").stages
        super().__init__(options, total_steps, steps_per_epoch, batch_size, passed)
        self.fresh = [*fresh]
        self._model = unwrapped(model)
        own = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._sizes = {name: parameter.numel() for name, parameter in own.items()}
        self.trained = [
            self._names(own, stage.train, f"stages.{number}.train")
            for number, stage in enumerate(self.options)
        ]
        self._check_trained()

    def resumed(self, starts: Sequence[int], fresh: Collection[str], step: int) -> "Stages":
        """Return the stages of a training that has reached ``step``.

        Stages that were entered keep their first steps, also if the training became longer.

        Raises:
            UserError: a stage would have ended before.
        """
        found = Stages(
            self._model,
            self.options,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            batch_size=self.batch_size,
            fresh=fresh,
            passed=starts,
        )
        entered = max(len(starts), 1)
        if entered < len(self.options) and found.starts[entered] < step:
            key, until = f"stages.{entered - 1}.until", self.options[entered - 1].until
            raise UserError(
                f"{key} = {until} is step {found.starts[entered]}, but the run is at step {step} "
                "and still in this stage. Give a later end, or choose another run_name"
            )
        return found

    # -- what ---------------------------------------------------------------------------------

    def _names(self, own: Mapping[str, nn.Parameter], train: Trained, key: str) -> frozenset[str]:
        """Return the names of the tensors that a stage trains."""
        encoder, last = self._model.encoder, train.last or 0
        if last >= encoder.depth:
            raise UserError(
                f"{key}.last = {last}, but the encoder has {encoder.depth} blocks; use train: all"
            )
        norms = [part for part in encoder.modules() if isinstance(part, nn.LayerNorm)]
        normed = {id(each) for norm in norms for each in norm.parameters()}
        pairs = [name.removeprefix("encoder.") for name in own if PAIRS in name]
        paired = {encoder.block_of(name) for name in pairs}
        self._check_pairs(pairs, paired, train, key)

        def trains(name: str, parameter: nn.Parameter) -> bool:
            inner = name.removeprefix("encoder.")
            if inner == name or encoder.timm_name_of(inner) in self.fresh:
                return True
            block = encoder.block_of(inner)
            if (train.all and not pairs) or (PAIRS in name and (train.all or train.lora)):
                return True
            if (train.all or train.norms) and id(parameter) in normed:
                return True
            if train.all:  # the blocks without pairs, which some stage trains whole
                return block is not None and block not in paired
            is_last = inner.startswith("norm.") if block is None else block >= encoder.depth - last
            return last > 0 and is_last

        return frozenset(name for name, parameter in own.items() if trains(name, parameter))

    def _check_pairs(
        self, pairs: Sequence[str], paired: Collection[int | None], train: Trained, key: str
    ) -> None:
        if train.lora and not pairs:
            raise UserError(
                f"{key}.lora = true, but there are no pairs; add the section lora: {{}}"
            )
        first = self._model.encoder.depth - (train.last or 0)
        twice = [block for block in paired if block is not None and block >= first]
        if twice:
            raise UserError(
                f"{key}.last = {train.last} trains block {min(twice)} whole, which has LoRA pairs. "
                "Train its pairs (lora: true), or add no pairs there"
            )

    def _check_trained(self) -> None:
        if any(PAIRS in name for name in self._sizes) and not any(
            PAIRS in name for names in self.trained for name in names
        ):
            raise UserError("lora has no effect: no stage trains the pairs; add lora: true, or all")
        for number, names in enumerate(self.trained):
            key = f"stages.{number}.train = {self.words(number)}"
            if not names:
                raise UserError(
                    f"{key} trains nothing: {' and '.join(self._model.layout.methods)} has no "
                    "head with weights. Train blocks, {last: 2}, or all"
                )
        for number, (before, names) in enumerate(pairwise(self.trained), 1):
            if before == names and self.options[number - 1].sizes == self.options[number].sizes:
                key = f"stages.{number}.train = {self.words(number)}"
                raise UserError(
                    f"{key} trains the same tensors as the stage before; leave one of them out"
                )

    def _check_sizes(self, number: int) -> None:
        for name, size in self.options[number].sizes.items():
            views = self._model.views
            if name not in views or pair(size) != views[name].shape:
                raise UserError(
                    f"stages.{number}.sizes.{name} = {spelled(size)}, but the model's views are "
                    f"{spelled({each: group.shape for each, group in views.items()})}. Recipes "
                    "change them; in your own loop, make a model with views of these sizes, and "
                    "load the state of this one"
                )

    def life(self, name: str) -> tuple[bool, ...]:
        """Return for every stage whether a tensor trains in it."""
        return tuple(name in names for names in self.trained)

    def entering(self, step: int) -> frozenset[str]:
        """Return the names of tensors that train at a step, counted from 0, and not before it."""
        before = self.trained[self.at(step - 1)] if step else frozenset()
        return self.trained[self.at(step)] - before

    @property
    def first_of_encoder(self) -> int:
        """The first step, counted from 0, at which tensors of the encoder train; 0 if none do."""
        for step, names in zip(self.starts, self.trained, strict=True):
            if any(name.startswith("encoder.") for name in names):
                return step
        return 0

    @property
    def dearest(self) -> int:
        """The stage in which most numbers train, which decides what fits into the memory."""
        return max(range(len(self.trained)), key=self.size)

    def size(self, number: int) -> int:
        """Return how many numbers train in a stage."""
        return sum(self._sizes[name] for name in self.trained[number])

    def words(self, number: int) -> str:
        """Return in words what trains in a stage, as a recipe has it."""
        return _words(self.options[number].train)

    def heading(self, number: int) -> str:
        """Return in words what trains in a stage, and the sizes of views that it has of its own."""
        sizes = self.options[number].sizes.items()
        views = " and ".join(f"{spelled(size)} px ({name})" for name, size in sizes)
        return f"{self.words(number)} at {views}" if views else self.words(number)

    def describe(self, number: int) -> str:
        """Return a line about a stage."""
        size, whole = self.size(number), sum(self._sizes.values())
        grows = number and self.entering(self.starts[number])
        ramp = f", new ones over a ramp of {self.ramps[number]} steps" if grows else ""
        return (
            f"stage {number + 1} of {len(self.starts)}, steps {self.starts[number] + 1} to "
            f"{self.end(number)}: {self.heading(number)}, {size / 1e6:.2f} of "
            f"{whole / 1e6:.2f} M parameters train{ramp}"
        )

    # -- doing --------------------------------------------------------------------------------

    def freeze(self, model: PretrainModel, number: int) -> None:
        """Let only the tensors of a stage have gradients, in this model or a copy of it."""
        for name, parameter in model.named_parameters():
            if name in self._sizes:
                parameter.requires_grad_(name in self.trained[number])
                if not parameter.requires_grad:
                    parameter.grad = None

    def begin(self, step: int, optimizer: torch.optim.Optimizer) -> bool:
        """Prepare the model and its optimiser for a step, counted from 0, in your own loop.

        The optimiser holds all tensors that train at some time. Moments of tensors that a stage
        freezes are dropped.

        Returns:
            Whether a stage begins. DDP does not notice tensors that begin to train: wrap the
            model again, or ranks drift apart. A compiled model is compiled again.
        """
        number = self.at(step)
        self._check_sizes(number)
        self.freeze(self._model, number)
        frozen = [p for name, p in self._model.named_parameters() if name in self._sizes]
        for parameter in frozen:
            if not parameter.requires_grad:
                optimizer.state.pop(parameter, None)
        return self.starts[number] == step


def _words(train: Trained) -> str:
    if train.all:
        return "all"
    given = train.model_dump(exclude_defaults=True)
    return spelled(given) if given else "heads"
