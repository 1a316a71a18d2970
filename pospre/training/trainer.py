"""The Composer ``Trainer`` of a run: its components, callbacks and loggers put together."""

from collections.abc import Sequence
from pathlib import Path

import torch
from composer import Trainer
from composer.core import Callback, DataSpec
from composer.utils import FSDP2Config, ParallelismConfig

from pospre.recipe.recipe import Recipe
from pospre.training.checkpoints.saver import CheckpointSaver
from pospre.training.checkpoints.uploads import Uploads
from pospre.training.clipping import MeanOverRanks, build_clipping
from pospre.training.components import Components
from pospre.training.loggers import build_loggers
from pospre.training.watch.build import build_watchers
from pospre.training.watch.divergence import Divergence
from pospre.training.watch.gradients import GradientNorms
from pospre.training.watch.position import LoaderPosition
from pospre.training.watch.progress import ProgressBar
from pospre.training.watch.record import RecipeRecord
from pospre.training.watch.resume import Resume
from pospre.training.watch.stop_signals import StopSignals


def build_trainer(
    components: Components,
    *,
    signals: StopSignals,
    resume: Resume | None = None,
    earlier: Sequence[Path] = (),
    uploads: Uploads | None = None,
    more_callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return the trainer of a run.

    Args:
        components: what the recipe makes.
        signals: ends the training when the process is told to stop.
        resume: loads the checkpoint to go on from; without it, from nothing.
        earlier: the local checkpoints up to that one, oldest first; they take part in
            ``trainer.keep_checkpoints``.
        uploads: what carries new ones into the bucket.
        more_callbacks: further callbacks; at each event they come before the checkpoint is saved.
    """
    recipe, model, device = components.recipe, components.model, components.device
    options = recipe.trainer
    precision = options.precision
    if precision == "amp_bf16" and device.name == "cpu":
        # Composer has mixed precision on GPUs only.
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # type: ignore
        precision = "fp32"
    callbacks = _callbacks(components, earlier, uploads, signals, more_callbacks)
    return Trainer(
        model=model,
        train_dataloader=DataSpec(
            components.loader, get_num_samples_in_batch=lambda b: len(b["index"])
        ),
        max_duration=options.max_duration,
        algorithms=[
            *components.algorithms,
            *build_clipping(options.clip_grad),
            # last here is first when gradients are there: Composer reverses the order then
            *([GradientNorms(options.log_interval)] if recipe.callbacks.gradient_norms else []),
            *([MeanOverRanks()] if options.fsdp and device.dist_backend == "gloo" else []),
        ],
        optimizers=components.optimizer,
        schedulers=components.schedule,
        step_schedulers_every_batch=True,
        callbacks=[*callbacks, *([resume] if resume else [])],
        loggers=build_loggers(recipe),
        run_name=recipe.run_name,
        progress_bar=False,
        parallelism_config=_parallelism(recipe),
        device=device,
        precision=precision,
        device_train_microbatch_size=options.microbatch_size,
        seed=recipe.seed,
        dist_timeout=options.dist_timeout,
        compile_config={} if options.compile else None,
    )


def _callbacks(
    components: Components,
    earlier: Sequence[Path],
    uploads: Uploads | None,
    signals: StopSignals,
    more_callbacks: Sequence[Callback],
) -> list[Callback]:
    recipe, options = components.recipe, components.recipe.trainer
    saver = CheckpointSaver(
        recipe.local_checkpoints(),
        interval=options.save_interval,
        keep=options.keep_checkpoints,
        earlier=earlier,
        sharded=options.checkpoint == "sharded",
    )
    if uploads is not None and saver.sharded:
        saver.after_shards.append(uploads.offer_together)
    elif uploads is not None:
        saver.after_save.append(uploads.offer)
    divergence = Divergence(recipe)
    saver.before_save.append(divergence.before_save)
    divergence.before_stop.append(saver.wait)  # what it names as good is whole
    callbacks: list[Callback] = [
        signals,  # first: it decides whether a step is the last one
        *build_watchers(recipe),
        LoaderPosition(components.loader),
        RecipeRecord(recipe, components.loader.num_samples),
        divergence,
        *more_callbacks,
        saver,
    ]
    if options.progress_bar:
        callbacks.append(ProgressBar(components.total_steps))
    return callbacks


def _parallelism(recipe: Recipe) -> ParallelismConfig | None:
    if recipe.trainer.fsdp is None:
        return None
    options = recipe.trainer.fsdp.model_dump()
    return ParallelismConfig(fsdp2=FSDP2Config(state_dict_type="full", **options))
