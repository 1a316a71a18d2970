"""Checks of a training loop: its batches, wrappers and optimiser."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pospre.batch import Batch, field_box_key, image_key
from pospre.errors import UserError
from pospre.model.registry import Registry

if TYPE_CHECKING:
    from pospre.model.algorithm import PretrainAlgorithm
    from pospre.model.model import PretrainModel

Kind = TypeVar("Kind")


def _alive(*kinds: type[Kind]) -> Iterator[Kind]:
    """Yield the process's objects of some classes; it takes about 0.1 s."""
    return (each for each in gc.get_objects() if issubclass(type(each), kinds))


def check_unwrapped(model: nn.Module, owner: str) -> None:
    """Raise ``UserError`` if ``model`` is already distributed: ranks would not share new parts.

    Every rank would draw its own heads, and their gradients would not be averaged.
    """
    wrappers: list[nn.Module] = []
    if distributed.is_initialized():
        wrappers = [*_alive(DistributedDataParallel, FullyShardedDataParallel)]
    wrapped = any(part is model for wrapper in wrappers for part in wrapper.modules())
    if wrapped or isinstance(model, FSDPModule):
        raise UserError(
            f"algorithms.{owner} is attached to a model that DDP or FSDP has already wrapped: each "
            "rank would have its own heads. Attach all algorithms first, then wrap the model and "
            "make the optimiser."
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


def check_normalised(images: Tensor) -> None:
    """Raise ``UserError`` for images from 0 to 255; normalised ones have negative values."""
    low, high = images.aminmax()
    if not images.is_floating_point() or (low >= 0 and high > 16):
        raise UserError(
            f"model.features got images of {images.dtype} from {low:.4g} to {high:.4g}, but takes "
            "normalised ones: model.augment.normalise(images), with images from 0 to 255."
        )


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the process's optimisers that hold a parameter of ``model``."""
    own = {id(parameter) for parameter in model.parameters()}
    return [each for each in _alive(Optimizer) if own & _held([each])]


def check_optimized(model: PretrainModel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UserError`` if a tensor is trained by no optimiser; warn of parts not frozen."""
    check_held(model, optimizers)
    for warning in unfrozen(model, optimizers):
        warnings.warn(warning, stacklevel=2)


def check_held(model: PretrainModel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UserError`` if a tensor with a gradient is in no optimiser's group."""
    left = left_out(model, optimizers)
    refuse_untrained([name for name, each in left.items() if each.requires_grad])


def left_out(model: PretrainModel, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors, by name, that are in no group of these optimisers."""
    held = _held(optimizers)
    return {name: each for name, each in model.named_parameters() if id(each) not in held}


def _held(optimizers: Iterable[Optimizer]) -> set[int]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def unfrozen(model: PretrainModel, optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Yield warnings of parts to freeze for some epochs, if no optimiser group is ``frozen``."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name in model.objectives:
        waiting = [part for part, epochs in model.objectives[name].frozen_epochs.items() if epochs]
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
            f"{', '.join(left[:3])}{more}. Attach the algorithms, and unfreeze or add tensors, "
            "before making the optimiser: "
            "model = pospre.PretrainModel(encoder, [pospre.MAE()], seed=0), and pass "
            "algorithms=model.algorithms to the Trainer. To freeze a tensor, call "
            "requires_grad_(False)."
        )
