"""Checks that an optimiser trains every tensor that has a gradient."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from pospre.errors import UserError
from pospre.model.layout import Layout


class Trained(Protocol):
    """A model with tensors to train."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield them."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield them with their names."""


def optimizers_of(model: Trained) -> list[Optimizer]:
    """Return the process's optimisers that hold a parameter of ``model``; takes about 0.1 s."""
    own = {id(parameter) for parameter in model.parameters()}
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Optimizer) and own & _held([each])
    ]


def check_held(model: Trained, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UserError`` if a tensor with a gradient is in no optimiser's group."""
    left = left_out(model, optimizers)
    refuse_untrained([name for name, each in left.items() if each.requires_grad])


def left_out(model: Trained, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors, by name, that are in no group of these optimisers."""
    held = _held(optimizers)
    return {name: each for name, each in model.named_parameters() if id(each) not in held}


def _held(optimizers: Iterable[Optimizer]) -> set[int]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def unfrozen(layout: Layout, optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Yield warnings of parts to freeze for some epochs, if no optimiser group is ``frozen``."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name, parts in layout.frozen.items():
        waiting = [part for part, epochs in parts.items() if epochs]
        if waiting and not any(group.get("frozen") for group in groups):
            yield (
                f"algorithms.{name} freezes {', '.join(waiting)} for some epochs. Only "
                "pospre.train's optimiser does this; yours trains them at once. Remove their "
                "gradients in these epochs, or freeze nothing (dinov2: freeze_epochs=0)."
            )


def refuse_untrained(left: list[str]) -> None:
    """Raise ``UserError`` if there are names of tensors that no optimiser trains."""
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UserError(
            f"{len(left)} tensors have a gradient, but no optimiser trains them: "
            f"{', '.join(left[:3])}{more}. Unfreeze or add tensors before making "
            "the optimiser, and make it of the model with its algorithms: "
            "model = pospre.PretrainModel(encoder, [pospre.MAE()], seed=0), and pass "
            "algorithms=model.algorithms to the Trainer. To freeze a tensor, call "
            "requires_grad_(False)."
        )
