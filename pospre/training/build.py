"""From a recipe to a Composer ``Trainer``: data, model, algorithms, optimiser, callbacks.

Everything the user can get wrong is found here, before anything is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, DataSpec
from composer.devices import Device
from composer.utils import FSDP2Config, ParallelismConfig, dist, get_device
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pospre.data.decode.deep import given_range
from pospre.data.loader import ViewLoader, build_loader
from pospre.data.views.augment import Augment, RandAugment
from pospre.data.views.plan import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.swin.encoder import SWIN
from pospre.recipe.recipe import Recipe, check_arguments, recorded_recipe
from pospre.recipe.sections import Size, View
from pospre.schedules import duration_steps
from pospre.training.checkpoints.saver import CheckpointSaver
from pospre.training.checkpoints.uploads import Uploads
from pospre.training.clipping import MeanOverRanks, build_clipping
from pospre.training.loggers import build_loggers, check_loggers
from pospre.training.normalisation import with_statistics
from pospre.training.optim import build_optimizer, build_schedule
from pospre.training.watch.divergence import Divergence
from pospre.training.watch.position import LoaderPosition
from pospre.training.watch.progress import ProgressBar
from pospre.training.watch.record import RecipeRecord
from pospre.training.watch.resume import Resume
from pospre.training.watch.stop_signals import StopSignals


def resolve_algorithms(recipe: Recipe) -> Recipe:
    """Return the recipe with every argument of its algorithms checked and spelled out.

    Raises:
        UserError: an algorithm or one of its arguments is unknown or of a wrong type.
    """
    checked = {
        name: check_arguments(f"algorithms.{name}", algorithm_class(name), given)
        for name, given in recipe.algorithms.items()
    }
    return recipe.model_copy(update={"algorithms": checked})


def with_defaults(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe that a run recorded with options that came later at their defaults."""
    try:
        return resolve_algorithms(recorded_recipe(recorded)).dump()
    except UserError:  # of a version whose options are not these: as it is
        return recorded


def build_algorithms(recipe: Recipe) -> list[PretrainAlgorithm]:
    """Return the recipe's algorithms in the order of attachment: hosts first."""
    resolved = resolve_algorithms(recipe).algorithms
    made = [algorithm_class(name)(**given) for name, given in resolved.items()]
    return sorted(made, key=lambda algorithm: not algorithm.is_host)


def build_model(recipe: Recipe) -> PretrainModel:
    """Return the recipe's model with its algorithms attached.

    The weights are a function of the recipe's seed: the same on every rank and at every start.
    """
    algorithms = build_algorithms(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        encoder = build_encoder(**recipe.encoder.arguments())
        model = PretrainModel(
            encoder,
            seed=recipe.seed,
            views=build_views(recipe),
            mean=recipe.data.mean,
            std=recipe.data.std,
        )
        for algorithm in algorithms:
            _check_encoder(algorithm, recipe)
            algorithm.attach(model)
        for algorithm in algorithms:
            algorithm.attach(model)  # again: what it takes from those after it is there now
        model.check_complete()
    return model


def _check_encoder(algorithm: PretrainAlgorithm, recipe: Recipe) -> None:
    """Raise ``UserError`` if the algorithm needs a ViT and the recipe has Swin."""
    if recipe.encoder.name == SWIN and not algorithm.takes_merged_patches:
        raise UserError(
            f"algorithms.{algorithm.module_name()} needs a token for every patch, but "
            f"encoder.name = {SWIN} merges patches. Use a ViT; of all algorithms only droppos "
            "and supervised take Swin."
        )


def build_views(recipe: Recipe) -> dict[str, ViewGroup]:
    """Return the recipe's view groups by name; a view has the encoder's size unless it says one."""
    size = recipe.encoder.image_size
    return {name: _build_view(name, view, size) for name, view in recipe.data.views.items()}


def _build_view(name: str, view: View, size: Size) -> ViewGroup:
    options = view.model_dump()
    changes = options.pop("augment")
    try:
        if changes["rand_augment"] is not None:
            changes["rand_augment"] = RandAugment(**changes["rand_augment"])
        augment = Augment(**changes)
    except UserError as error:
        raise UserError(f"data.views.{name}.{error}") from None
    return ViewGroup(name=name, augment=augment, **{**options, "size": view.size or size})


def build_data(recipe: Recipe) -> ViewLoader:
    """Return this rank's loader."""
    data, world = recipe.data, dist.get_world_size()
    if data.batch_size % world:
        raise UserError(
            f"data.batch_size = {data.batch_size} is the batch over all ranks and must be a "
            f"multiple of their number, {world}"
        )
    loader = build_loader(
        data.path,
        views=list(build_views(recipe).values()),
        batch_size=data.batch_size // world,
        seed=recipe.seed,
        rank=dist.get_global_rank(),
        world_size=world,
        num_workers=data.num_workers,
        repeats=data.repeats,
        order=data.order,
        window=data.window,
        bad_samples=data.bad_samples,
        tolerance=data.tolerance,
        pin_memory=recipe.trainer.device != "cpu",
        cache_dir=data.cache_dir,
        cache_limit=data.cache_limit,
        channels=recipe.encoder.channels,
        deep_range=given_range(data.deep_range),
    )
    loader.probe()
    return loader


@dataclass(frozen=True)
class Parts:
    """What a recipe makes before the trainer: checked, and nothing written yet."""

    recipe: Recipe
    device: Device
    loader: ViewLoader
    model: PretrainModel
    optimizer: Optimizer
    schedule: LambdaLR
    total_steps: int


def build_parts(recipe: Recipe) -> Parts:
    """Return the checked recipe with what it is made of."""
    recipe = resolve_algorithms(recipe)
    check_loggers(recipe)
    device = build_device(recipe)
    loader = build_data(recipe)
    recipe = with_classes(recipe, loader.classes)
    model = build_model(recipe)
    recipe = with_statistics(recipe, loader.reader)
    model.normalise_by(recipe.data.mean, recipe.data.std)
    batch_size, epoch_steps = recipe.data.batch_size, len(loader)
    total_steps = duration_steps(
        recipe.trainer.max_duration, steps_per_epoch=epoch_steps, batch_size=batch_size
    )
    optimizer = build_optimizer(model, recipe.optimizer, batch_size=batch_size)
    schedule = build_schedule(
        optimizer,
        recipe.schedule,
        rates=recipe.optimizer,
        total_steps=total_steps,
        steps_per_epoch=epoch_steps,
        batch_size=batch_size,
    )
    return Parts(recipe, device, loader, model, optimizer, schedule, total_steps)


def with_classes(recipe: Recipe, classes: Sequence[str] | None) -> Recipe:
    """Return the recipe with those arguments spelled out that depend on the data's classes."""
    algorithms = {
        name: algorithm_class(name).for_classes(arguments, classes, recipe.data.path)
        for name, arguments in recipe.algorithms.items()
    }
    return recipe.model_copy(update={"algorithms": algorithms})


def build_device(recipe: Recipe) -> Device:
    """Return the device to train on.

    Raises:
        UserError: there is no GPU, or the precision is not for this device.
    """
    wanted, precision = recipe.trainer.device, recipe.trainer.precision
    if wanted == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer.device = gpu, but torch sees no GPU; use trainer.device=cpu")
    device = get_device(None if wanted == "auto" else wanted)
    if device.name == "cpu" and precision == "amp_fp16":
        raise UserError("trainer.precision = amp_fp16 needs a GPU; on the CPU use fp32 or amp_bf16")
    for name, view in recipe.data.views.items():
        if device.name == "cpu" and recipe.trainer.compile and view.augment.erase_rate:
            # torch 2.7's inductor frees memory twice in the C++ that it writes for this
            raise UserError(
                f"trainer.compile on the CPU crashes with data.views.{name}.augment.erase_rate > 0 "
                "(torch 2.7); leave one of them out, or use a GPU"
            )
    return device


def assemble(
    parts: Parts,
    *,
    signals: StopSignals,
    resume: Resume | None = None,
    earlier: Sequence[Path] = (),
    uploads: Uploads | None = None,
) -> Trainer:
    """Return the trainer of ``parts``.

    Args:
        parts: what the recipe makes.
        signals: ends the training when the process is told to stop.
        resume: loads the checkpoint to go on from; without it, from nothing.
        earlier: the local checkpoints up to that one, oldest first; they take part in
            ``trainer.keep_checkpoints``.
        uploads: what carries new ones into the bucket.
    """
    recipe, model, loader = parts.recipe, parts.model, parts.loader
    options = recipe.trainer
    precision = options.precision
    if precision == "amp_bf16" and parts.device.name == "cpu":
        # Composer has mixed precision on GPUs only.
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # type: ignore
        precision = "fp32"
    return Trainer(
        model=model,
        train_dataloader=DataSpec(loader, get_num_samples_in_batch=lambda b: len(b["index"])),
        max_duration=options.max_duration,
        algorithms=[
            *build_algorithms(recipe),
            *build_clipping(options.clip_grad),
            # last here is first when gradients are there: Composer reverses the order then
            *([MeanOverRanks()] if options.fsdp and parts.device.dist_backend == "gloo" else []),
        ],
        optimizers=parts.optimizer,
        schedulers=parts.schedule,
        step_schedulers_every_batch=True,
        callbacks=[*_callbacks(parts, earlier, uploads, signals), *([resume] if resume else [])],
        loggers=build_loggers(recipe),
        run_name=recipe.run_name,
        progress_bar=False,
        parallelism_config=_parallelism(recipe),
        device=parts.device,
        precision=precision,
        device_train_microbatch_size=options.microbatch_size,
        seed=recipe.seed,
        dist_timeout=options.dist_timeout,
        compile_config={} if options.compile else None,
    )


def _callbacks(
    parts: Parts, earlier: Sequence[Path], uploads: Uploads | None, signals: StopSignals
) -> list[Callback]:
    recipe, options = parts.recipe, parts.recipe.trainer
    saver = CheckpointSaver(
        recipe.local_checkpoints(),
        interval=options.save_interval,
        keep=options.keep_checkpoints,
        earlier=earlier,
    )
    if uploads is not None:
        saver.after_save.append(uploads.offer)
    divergence = Divergence(recipe)
    saver.before_save.append(divergence.before_save)
    callbacks: list[Callback] = [
        signals,  # first: it decides whether a step is the last one
        LoaderPosition(parts.loader),
        RecipeRecord(recipe, parts.loader.num_samples),
        divergence,
        saver,
    ]
    if options.progress_bar:
        callbacks.append(ProgressBar(parts.total_steps))
    return callbacks


def _parallelism(recipe: Recipe) -> ParallelismConfig | None:
    if recipe.trainer.fsdp is None:
        return None
    options: dict[str, Any] = recipe.trainer.fsdp.model_dump()
    return ParallelismConfig(fsdp2=FSDP2Config(state_dict_type="full", **options))
