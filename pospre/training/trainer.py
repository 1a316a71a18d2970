"""The Composer ``Trainer`` of a run, with its components, callbacks and loggers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, DataSpec
from composer.devices import Device
from composer.utils import ParallelismConfig

from pospre.arguments import Section
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.run.resume import LoaderPosition
from pospre.training.build import Components
from pospre.training.callbacks.collapse import Collapse
from pospre.training.callbacks.compiling import Compiling
from pospre.training.callbacks.divergence import Divergence
from pospre.training.callbacks.each_step import EachStep
from pospre.training.callbacks.gradients import GradientNorms
from pospre.training.callbacks.metrics import MetricsFile
from pospre.training.callbacks.position_shortcut import PositionShortcut
from pospre.training.callbacks.progress import ProgressBar
from pospre.training.callbacks.spikes import LossSpikes
from pospre.training.callbacks.stalls import Stalls
from pospre.training.callbacks.stop_signals import StopSignals
from pospre.training.callbacks.watcher import WARNINGS
from pospre.training.device import composer_precision, uses_cudnn
from pospre.training.loggers import build_metrics_file
from pospre.training.optimizer.clipping import build_clipping
from pospre.training.scale.blocks import recompute_blocks
from pospre.training.scale.compilation import choose_parts, compile_model, open_cache
from pospre.training.scale.float8 import use_float8
from pospre.training.scale.fsdp import MeanOverRanks, build_sharding
from pospre.training.scale.microbatch import microbatch_size
from pospre.training.step import StepTrainer


def build_trainer(
    components: Components,
    *,
    signals: StopSignals,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return the trainer of a run.

    Args:
        components: of the recipe.
        signals: ends the training when the process gets a signal.
        callbacks: further ones, such as those of ``Run.begin``; without a saver nothing is saved.
    """
    recipe, model, device = components.recipe, components.model, components.device
    options = recipe.trainer
    microbatch = microbatch_size(components)  # before anything below changes the model
    precision = composer_precision(model, recipe, device)
    if options.float8:
        use_float8(model, device)
    compiled = _compile(model, recipe, device)
    if options.activation_checkpointing:
        recompute_blocks(model, offload=options.activation_checkpointing == "offload")
    sharding = build_sharding(options.fsdp)
    metrics = build_metrics_file(recipe)
    return StepTrainer(
        model=model,
        cudnn=uses_cudnn(recipe, device),
        train_dataloader=DataSpec(
            components.loader, get_num_samples_in_batch=lambda b: len(b["index"])
        ),
        max_duration=options.max_duration,
        algorithms=[
            *components.algorithms,
            *build_clipping(options.clip_grad),
            # last here is first once gradients are available: Composer reverses the order then
            *([GradientNorms(options.log_interval)] if recipe.callbacks.gradient_norms else []),
            *([MeanOverRanks()] if sharding and device.dist_backend == "gloo" else []),
        ],
        optimizers=components.optimizer,
        schedulers=components.schedule,
        step_schedulers_every_batch=True,
        callbacks=[*compiled, *_callbacks(components, signals, metrics, callbacks)],
        loggers=[metrics],
        run_name=recipe.run_name,
        progress_bar=False,
        parallelism_config=None if sharding is None else ParallelismConfig(fsdp2=sharding),
        device=device,
        precision=precision,
        device_train_microbatch_size=microbatch,
        seed=recipe.seed,
        dist_timeout=options.dist_timeout,
    )


def _compile(model: PretrainModel, recipe: Recipe, device: Device) -> list[Callback]:
    """Compile as in the recipe; return the callback that reports it."""
    parts = choose_parts(recipe.trainer, device)
    if parts is None:
        return []
    if parts == "step" and recipe.trainer.activation_checkpointing:
        torch._dynamo.config.optimize_ddp = False  # it does not support recomputed blocks
    compile_model(model, parts, device)
    return [Compiling(parts, open_cache())]


def _callbacks(
    components: Components, signals: StopSignals, metrics: MetricsFile, more: Sequence[Callback]
) -> list[Callback]:
    recipe = components.recipe
    watchers, divergence = _watchers(recipe), Divergence(recipe)
    spikes = [each for each in watchers if isinstance(each, LossSpikes)]
    # a step's line is written, and the step checked, before it is saved
    judges: list[MetricsFile | EachStep] = [metrics, *spikes, divergence]
    for saver in (each for each in more if isinstance(each, CheckpointSaver)):
        saver.before_save += [each.before_save for each in judges]
        divergence.before_stop.append(saver.wait)  # so that the checkpoint it names is complete
    bar = [ProgressBar(components.total_steps)] if recipe.trainer.progress_bar else []
    return [
        signals,  # first: it decides whether a step is the last one
        *watchers,
        LoaderPosition(components.loader),
        divergence,
        *more,
        *bar,
    ]


def _watchers(recipe: Recipe) -> list[Callback]:
    """Return the recipe's monitoring callbacks; their warnings go into the run's folder."""
    options, log = recipe.callbacks, recipe.run_path() / WARNINGS
    regularly = {"interval": recipe.trainer.log_interval}
    found: list[tuple[Callable[..., Callback], Section | None, dict[str, Any]]] = [
        (Stalls, options.stalls, regularly),
        (LossSpikes, options.loss_spikes, {"recipe": recipe}),
        (Collapse, options.collapse, regularly),
        (PositionShortcut, options.position_shortcut, regularly),
    ]
    return [kind(log=log, **more, **own.model_dump()) for kind, own, more in found if own]
