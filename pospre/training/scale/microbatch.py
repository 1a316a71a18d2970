"""The number of a rank's samples that are on the device at once, and its effect on the loss.

``trainer.microbatch_size: auto`` tries steps before training, on a copy of the model that is then
discarded. Meanwhile ranks do not communicate: data from others is replaced by dummies of its true
size. So a rank that runs out of memory blocks no other, and the following training is the same as
with this size set explicitly.
"""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from composer.core import Precision, get_precision_context
from composer.distributed.prepare_distributed import parallelize_composer_model
from composer.utils import dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from pospre.batch import Batch, image_key, without_images
from pospre.collectives import print_once
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe
from pospre.training.build import Components
from pospre.training.optimizer.optim import build_optimizer
from pospre.training.precision import composer_precision
from pospre.training.scale.blocks import recompute_blocks
from pospre.training.scale.fsdp import build_sharding

_SHARE = 0.9  # of a GPU's memory for a trial: training also has collectives' buffers


def microbatch_size(run: Components) -> int | None:
    """Return the number of a rank's samples that are on the device at once; None: all."""
    asked, whole = run.recipe.trainer.microbatch_size, run.loader.batch_size
    size = _largest(run) if asked == "auto" else asked
    changed = None if size is None else loss_change(run.model.layout.coupled, size, whole)
    if changed is not None:
        print_once(changed)
    return size


def loss_change(coupled: str, size: int, whole: int) -> str | None:
    """Return a line on how microbatches of ``size`` samples change the losses; None: no change.

    A rank's batch has ``whole`` samples. ``coupled`` is what couples them, see ``Layout.coupled``.
    """
    if size >= whole or not coupled:
        return None
    return (
        f"trainer.microbatch_size = {size} of a rank's {whole}: {coupled} see {size} samples at "
        "once, so the losses are not those of the whole batch"
    )


def out_of_memory(recipe: Recipe) -> str:
    """Return remedies for a model that does not fit on its device."""
    used, options = recipe.trainer, []
    if used.microbatch_size != 1:
        options.append("a smaller trainer.microbatch_size (or auto)")
    if not used.activation_checkpointing:
        options.append("trainer.activation_checkpointing=true")
    if used.fsdp is None:
        options.append("trainer.fsdp={} on several GPUs")
    return ", ".join([*options, "more GPUs, or a smaller encoder"])


def _largest(run: Components) -> int:
    """Return the largest of the batch, its half, its quarter … that fits on every rank."""
    whole = size = run.loader.batch_size
    while _failed_anywhere(run, size):
        if size == 1:
            raise UserError(
                "trainer.microbatch_size = auto: the device runs out of memory with one sample at "
                f"a time. Use {out_of_memory(run.recipe)}"
            )
        size = size // 2
    print_once(f"trainer.microbatch_size = auto: {size} of a rank's {whole} samples at a time")
    return size


def _failed_anywhere(run: Components, size: int) -> bool:
    """Try ``size`` samples on every rank; all ranks return the same."""
    on_gpu = run.device.name == "gpu"
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(_SHARE)
    try:
        _try(run, size)
        failed = 0
    except torch.OutOfMemoryError:
        failed = 1
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
    anywhere = run.device.tensor_to_device(torch.tensor(failed))
    if dist.get_world_size() > 1:
        dist.all_reduce(anywhere, "MAX")
    return bool(anywhere)


def _try(run: Components, size: int) -> None:
    """Run two steps on a copy of the model; the second includes the optimiser's state."""
    recipe, options = run.recipe, run.recipe.trainer
    model = copy.deepcopy(run.model)
    precision, casting = composer_precision(recipe, run.device)
    if options.activation_checkpointing:
        recompute_blocks(model, offload=options.activation_checkpointing == "offload")
    optimizer = build_optimizer(model, recipe.optimizer, batch_size=recipe.data.batch_size)
    if run.stages is not None:  # the size is one for the whole run
        run.stages.freeze(model, run.stages.dearest)
    buckets = _distribute(run, model, optimizer, precision)
    batch = run.device.batch_to_device(_made_up(run, size))
    with _without_other_ranks():
        for _ in range(2):
            inputs = model.prepare(dict(batch), 0.0)
            with get_precision_context(precision):
                with casting:
                    outputs = model(inputs)
                loss = model.loss(outputs, inputs)["total"]
            loss.backward()
            optimizer.step()
    del buckets


def _distribute(
    run: Components, model: PretrainModel, optimizer: torch.optim.Optimizer, precision: str
) -> list[Tensor]:
    """Move the model to its place in training; return what DDP would keep in addition."""
    config = build_sharding(run.recipe.trainer.fsdp)
    if config is None:
        run.device.module_to_device(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [torch.empty_like(p) for p in trained] if dist.get_world_size() > 1 else []
    kind = "cuda" if run.device.name == "gpu" else run.device.name
    shape = (config.num_copies or 1, dist.get_world_size() // (config.num_copies or 1))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("copies", "shards"))
    config.device_mesh = mesh if config.num_copies else mesh["shards"]
    parallelize_composer_model(model, optimizer, config, Precision(precision))
    return []


def _made_up(run: Components, size: int) -> Batch:
    """Return a batch of black views with the sizes of the loader's."""
    reader = run.loader.reader
    channels, dtype = reader.decoding.channels, torch.uint8
    if reader.features is not None:
        channels, dtype = 1, torch.float32
    views = run.model.views
    batch = without_images(size, {name: group.count for name, group in views.items()})
    for name, group in views.items():
        pixels = torch.zeros(size, group.count, *group.shape, channels, dtype=dtype)
        batch[image_key(name)] = pixels.movedim(-1, 2)
    return batch


@contextmanager
def _without_other_ranks() -> Iterator[None]:
    """Make collectives return at once, without other ranks; gathers copy this rank's data."""

    def gather(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        own = input_tensor.clone()  # it may be a part of the output
        output_tensor.view(-1, own.numel()).copy_(own.view(1, -1))

    def gather_list(tensor_list: list[Tensor], tensor: Tensor, *_: Any, **__: Any) -> None:
        for part in tensor_list:
            part.copy_(tensor)

    def scatter(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
        output.copy_(input.flatten()[: output.numel()].view_as(output))

    replaced: dict[str, Any] = {
        "all_gather": gather_list,
        "all_gather_into_tensor": gather,
        "all_gather_single": gather,  # a name that sharding uses in later torch
        "all_reduce": lambda *_, **__: None,
        "reduce_scatter_single": scatter,
        "reduce_scatter_tensor": scatter,
    }
    known = {name: made for name, made in replaced.items() if hasattr(torch.distributed, name)}
    with mock.patch.multiple("torch.distributed", **known):
        yield
