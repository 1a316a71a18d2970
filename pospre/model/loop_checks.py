"""Checks of a training loop: its batches, sample indices, wrappers and optimiser."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pospre.batch import EPOCH, INDEX, Batch, field_box_key, image_key
from pospre.errors import UserError
from pospre.model.registry import Registry

if TYPE_CHECKING:
    from pospre.model.algorithm import PretrainAlgorithm
    from pospre.model.model import PretrainModel

_WRAPPERS: WeakSet[nn.Module] = WeakSet()
_STEPPED: WeakSet[Optimizer] = WeakSet()
_LOOKED_AT = 256
"""Number of forwards in which indices are checked: on a GPU, reading them synchronises."""
_PIXELS_APART = 997


def _note_wrapper(module: nn.Module, name: str, part: Any) -> None:
    if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
        _WRAPPERS.add(module)


register_module_module_registration_hook(_note_wrapper)


def check_unwrapped(model: nn.Module, owner: str) -> None:
    """Raise ``UserError`` if ``model`` is already distributed: ranks would not share new parts.

    Every rank would draw its own heads, and their gradients would not be averaged.
    """
    wrapped = any(part is model for wrapper in _WRAPPERS for part in wrapper.modules())
    if wrapped or isinstance(model, FSDPModule):
        raise UserError(
            f"algorithms.{owner} is attached to a model that DDP or FSDP has already wrapped: each "
            "rank would have its own heads. Attach all algorithms first, then wrap the model and "
            "make the optimiser."
        )


class NumberCheck:
    """Detects sample indices that repeat within an epoch with other images."""

    def __init__(self) -> None:
        self.calls = 0
        self.images: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.repeats: Counter[int] = Counter()

    def look(self, batch: Batch) -> None:
        """Raise ``UserError`` if every sample's index has repeated twice, with another image.

        Masks are drawn from index and epoch, so such images get the same masks. A few repeats are
        fine: samplers pad the last batch or draw with replacement.
        """
        images = next((value for key, value in batch.items() if key.endswith("/image")), None)
        if self.calls == _LOOKED_AT or images is None:
            self.images.clear()
            return
        self.calls += 1
        pixels = images.flatten(1)[:, ::_PIXELS_APART].tolist()
        indices = batch[INDEX].tolist()
        for index, epoch, row in zip(indices, batch[EPOCH].tolist(), pixels, strict=True):
            seen, image = self.images[index, epoch], hash(tuple(row))
            self.repeats[index] += bool(seen) and image not in seen
            seen.add(image)
        if all(self.repeats[index] >= 2 for index in indices):
            raise UserError(
                f"three batches of different images have the same '{INDEX}' and '{EPOCH}', from "
                "which masks are drawn, so the masks would never change. Give each image its "
                "position in the data set as index (not its position in the batch), and count the "
                "epochs. To repeat a sample within an epoch, use another epoch number."
            )


def lacking(registry: Registry, key: str) -> UserError:
    """Return the error for a batch without ``key``."""
    if key in registry.writers:
        return UserError(
            f"the batch lacks '{key}', which algorithms.{registry.writers[key]} writes before the "
            "forward: call model(batch, progress=…), or pass algorithms=model.algorithms to the "
            "Trainer."
        )
    group = key.rpartition("/")[0]
    where = f", for views of the group '{group}'" if group else ""
    return UserError(
        f"the batch lacks '{key}'{where}; pospre.build_loader and pospre.from_images write it."
    )


def check_claimed(
    model: PretrainModel, algorithm: PretrainAlgorithm, before: Batch, after: Batch
) -> None:
    """Raise ``UserError`` if ``algorithm`` has added a key that it did not claim, or another's."""
    others = {each.module_name() for each in model.algorithms} - algorithm.names()
    for key in (key for key, value in after.items() if before.get(key) is not value):
        owner = model.registry.writers.get(key)
        if owner in others or (owner is None and key not in before):
            places = key in map(field_box_key, model.views)
            call = "place_views(owner)" if places else f"claim('{key}', owner)"
            raise UserError(
                f"algorithms.{algorithm.module_name()} writes the batch key '{key}', which "
                f"{owner or 'no algorithm'} claims. Write only keys that attach claims, here by "
                f"model.registry.{call}."
            )


def check_is_batch(batch: Batch) -> None:
    """Raise ``UserError`` if ``batch`` is not a batch, but for example images alone."""
    if not isinstance(batch, dict):
        raise UserError(
            "a PretrainModel takes a batch, a dict as made by pospre.from_images, not "
            f"{type(batch).__name__}. For tokens of whole images, call model.encoder(images)."
        )


def check_batch(registry: Registry, batch: Batch) -> None:
    """Raise ``UserError`` unless the passes' patches exist and views have the declared shape."""
    check_is_batch(batch)
    for declared in registry.passes.values():
        views, key = registry.views[declared.group], image_key(declared.group)
        shape = (views.count, registry.encoder.channels, *views.shape)
        if key in batch and batch[key].shape[1:] != shape:
            raise UserError(
                f"'{key}' has the shape {tuple(batch[key].shape)}, but the model needs (B, "
                f"{', '.join(map(str, shape))}): views, channels, height and width. Crop the "
                "images to this size, or make the encoder and the model for theirs."
            )
        for patches in (declared.visible, declared.context):
            if patches in registry.writers and patches not in batch:
                raise lacking(registry, patches)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _STEPPED.add(optimizer)


register_optimizer_step_post_hook(_note_step)


def check_stepped(model: PretrainModel) -> None:
    """Raise ``UserError`` if the optimisers that have stepped omit some tensors.

    Checking for changed values would not work: early in a long warm-up, the rate is too small to
    change a weight of 1. Only tensors with a gradient are checked. Optimisers that are not
    torch's, or whose ``step`` is compiled, are not detected.
    """
    if model.is_checked:
        return
    left = _left_out(model, _STEPPED)
    if len(left) < len([*model.parameters()]):
        model.is_checked = True  # checked once
        _refuse_untrained([name for name, each in left.items() if each.grad is not None])


def check_followed(model: PretrainModel) -> None:
    """Raise ``UserError`` if the weights change every step, but ``after_step`` is never called.

    Without a teacher, ``after_step``'s own check runs here instead. Loading weights also changes
    them, but not three times in a row.
    """
    if model.is_followed or model.is_checked:
        return
    trained = [each for each in model.parameters() if each.requires_grad]
    # fused optimisers do not increase versions, so compare one tensor's values. Their sum would
    # hardly change: beside a LayerNorm, before or after it, a weight's gradients sum to almost 0.
    one = max(trained, key=torch.Tensor.numel, default=torch.zeros(()))
    size = torch.linalg.vector_norm(one.detach(), 1, dtype=torch.float64)
    seen = sum(each._version for each in trained), size.item()
    if seen != model.seen_weights:
        model.seen_weights = seen
        model.moves_seen += 1
    if model.moves_seen <= 3:  # the first is the initial state
        return
    check_stepped(model)
    if model.teachers.momentum is not None:
        raise UserError(
            f"algorithms.{model.teachers.owner} has a teacher that is never updated: the "
            "optimiser has changed the weights three times without a call of "
            "model.after_step(progress). Call it after each optimiser step."
        )
    model.is_followed = True  # no teacher to update


def check_optimized(model: PretrainModel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UserError`` if a tensor with a gradient is in no optimiser's group."""
    left = _left_out(model, optimizers)
    _refuse_untrained([name for name, each in left.items() if each.requires_grad])
    _warn_of_unfrozen(model, optimizers)


def _left_out(model: PretrainModel, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors, by name, that are in no group of these optimisers."""
    groups = _groups(optimizers)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return {name: each for name, each in model.named_parameters() if id(each) not in held}


def _groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _warn_of_unfrozen(model: PretrainModel, optimizers: Iterable[Optimizer]) -> None:
    """Warn if parts should be frozen for some epochs, but no optimiser group is ``frozen``."""
    groups = _groups(optimizers)
    for name in model.objectives:
        waiting = [part for part, epochs in model.objectives[name].frozen_epochs.items() if epochs]
        if waiting and not any(group.get("frozen") for group in groups):
            warnings.warn(
                f"algorithms.{name} freezes {', '.join(waiting)} for some epochs. Only "
                "pospre.train's optimiser does this; yours trains them at once. Remove their "
                "gradients in these epochs, or freeze nothing (dinov2: freeze_epochs=0).",
                stacklevel=2,
            )


def _refuse_untrained(left: list[str]) -> None:
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UserError(
            f"{len(left)} tensors have a gradient, but no optimiser trains them: "
            f"{', '.join(left[:3])}{more}. Attach the algorithms before making the optimiser: "
            "model = pospre.PretrainModel(encoder, [pospre.MAE()], seed=0), and pass "
            "algorithms=model.algorithms to the Trainer. To freeze a tensor, call "
            "requires_grad_(False)."
        )
