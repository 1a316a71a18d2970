"""Gradient clipping by the three norms in use."""

from collections.abc import Callable, Iterable

import torch
from composer.algorithms import GradientClipping
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import Tensor
from torch.distributed.tensor import DTensor

from pospre.model.algorithm import pretrain_model
from pospre.recipe.sections import ClipGrad


class PerTensorClipping(Algorithm):
    """Clip the gradient of every parameter tensor to a norm of its own, as DINO and DropPos do."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def match(self, event: Event, state: State) -> bool:
        """Run when the gradients of all microbatches are there."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Scale down each gradient whose norm is above the threshold."""
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                clip_together([parameter.grad], self.threshold)


class PerModuleClipping(Algorithm):
    """Clip the encoder by one norm and every head by its own, as DINOv2 does.

    The encoder counts together with what edits its tokens; the heads are the children of the
    objectives.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def match(self, event: Event, state: State) -> bool:
        """Run when the gradients of all microbatches are there."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Scale down the gradients of each module whose norm is above the threshold."""
        modules: dict[str, list[Tensor]] = {}
        for name, parameter in pretrain_model(state).named_parameters():
            if parameter.grad is not None:
                modules.setdefault(module_of(name), []).append(parameter.grad)
        for gradients in modules.values():
            clip_together(gradients, self.threshold)


def module_of(name: str) -> str:
    """Return the module with which a parameter is clipped: ``encoder``, or a child of an objective.

    Whatever is in the model besides the objectives makes tokens, and counts as the encoder.
    """
    if not name.startswith("objectives."):
        return "encoder"
    return ".".join(name.split(".")[2:4])  # objectives.named.<objective>.<child>


def clip_together(gradients: Iterable[Tensor], threshold: float) -> None:
    """Scale ``gradients`` in place to one norm of at most ``threshold``, over all their shards."""
    gradients = list(gradients)
    total = torch.stack([_norm(gradient) for gradient in gradients]).norm()
    factor = (threshold / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        # The factor is the same on every rank; scaling each shard is local.
        _local(gradient).mul_(factor)


def _norm(gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient)
    # The norm of a sharded tensor is a sum still to be made.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def build_clipping(options: ClipGrad | None) -> list[Algorithm]:
    """Return the algorithm that clips gradients, if the recipe asks for one."""
    if options is None:
        return []
    makers: dict[str, Callable[[float], Algorithm]] = {
        "norm": lambda threshold: GradientClipping("norm", threshold),
        "per_tensor": PerTensorClipping,
        "per_module": PerModuleClipping,
    }
    return [makers[options.mode](options.threshold)]
