"""Gradients: their clipping by one of three norms, and the norm of every module before it."""

from collections.abc import Callable, Iterable

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pospre.model.algorithm import pretrain_model
from pospre.recipe.sections import ClipGrad
from pospre.training.callbacks.watchers import is_due


class _Clipping(Algorithm):
    def match(self, event: Event, state: State) -> bool:
        """Run when the gradients of all microbatches are available."""
        return event == Event.AFTER_TRAIN_BATCH


class GroupClipping(_Clipping):
    """Clips the gradients of every group of parameters by the group's own norm.

    ``group_of`` returns the group of a parameter by the parameter's name.
    """

    def __init__(self, threshold: float, group_of: Callable[[str], str]) -> None:
        self.threshold = threshold
        self.group_of = group_of

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Scale down the gradients of each group whose norm is above the threshold."""
        for parameters in with_gradients(state, self.group_of).values():
            clip_grads_with_norm_(parameters, self.threshold, gradient_norm(parameters))


class TensorClipping(_Clipping):
    """Clips the gradient of every tensor separately to the norm ``threshold``, with few kernels."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Scale down each gradient whose norm is above the threshold."""
        parameters = pretrain_model(state).parameters()
        gradients = [each.grad for each in parameters if each.grad is not None]
        # bit-equal to ``clip_grads_with_norm_``
        factors = (self.threshold / (tensor_norms(gradients) + 1e-6)).clamp(max=1.0)
        shards = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        torch._foreach_mul_(shards, factors.unbind())


def module_of(name: str) -> str:
    """Return the module with which a parameter is clipped: ``encoder``, or a child of an objective.

    Everything besides the objectives produces tokens, and counts as the encoder.
    """
    if not name.startswith("objectives."):
        return "encoder"
    return ".".join(name.split(".")[2:4])  # objectives.named.<objective>.<child>


def with_gradients(state: State, group_of: Callable[[str], str]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that have gradients, by group."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in pretrain_model(state).named_parameters():
        if parameter.grad is not None:
            groups.setdefault(group_of(name), []).append(parameter)
    return groups


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of some parameters, over all their shards."""
    norm = get_total_norm(each.grad for each in parameters if each.grad is not None)
    # for sharded tensors it is a sum that is still to be computed
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, over all its shards: (number of tensors,)."""
    norms = torch._foreach_norm(tensors)
    first = norms[0]
    if not isinstance(first, DTensor):
        return torch.stack(norms)
    # sums still to be computed: one exchange for all
    parts = torch.stack([each.to_local() for each in norms])  # type: ignore[attr-defined]
    return DTensor.from_local(parts, first.device_mesh, first.placements).full_tensor()


def build_clipping(options: ClipGrad | None) -> list[Algorithm]:
    """Return the algorithm that clips gradients, if the recipe has one."""
    if options is None:
        return []
    if options.mode == "norm":  # Composer's algorithm would import transformers, for a second
        return [GroupClipping(options.threshold, lambda _: "model")]
    if options.mode == "per_tensor":  # DINO and DropPos
        return [TensorClipping(options.threshold)]
    return [GroupClipping(options.threshold, module_of)]  # DINOv2: the encoder, and every head


class GradientNorms(Algorithm):
    """Logs ``gradient/encoder`` and ``gradient/<objective>`` at the steps that are logged.

    The encoder includes the modules that edit its tokens. This is an algorithm, because callbacks
    come after clipping. It follows the clipping in the list; Composer reverses the order once
    gradients are available, so it runs first. The host waits for the norms only when the losses
    are available, too.

    Args:
        interval: steps between checks.
    """

    def __init__(self, interval: int = 10) -> None:
        self.interval = interval
        self._norms: dict[str, Tensor] = {}

    def match(self, event: Event, state: State) -> bool:
        """Run when the gradients of all microbatches are available, and after the step."""
        step = state.timestamp.batch.value
        if event == Event.AFTER_TRAIN_BATCH:
            return is_due(step + 1, self.interval)
        return event == Event.BATCH_END and bool(self._norms)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Measure, then log."""
        if event == Event.AFTER_TRAIN_BATCH:
            groups = with_gradients(state, _owner)
            self._norms = {name: gradient_norm(parameters) for name, parameters in groups.items()}
            return
        values = torch.stack(list(self._norms.values())).tolist()
        names = [f"gradient/{name}" for name in self._norms]
        self._norms = {}
        logger.log_metrics(dict(zip(names, values, strict=True)))


def _owner(name: str) -> str:
    """Return ``encoder``, or the objective that owns a parameter."""
    return name.split(".")[2] if name.startswith("objectives.") else "encoder"
