"""Training of a recipe, from the start or from where it stopped, to its end."""

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, DataSpec
from composer.devices import Device
from composer.utils import ParallelismConfig, dist

from pospre.arguments import Section
from pospre.collectives import from_rank_zero, print_once
from pospre.data.memory import estimate_memory
from pospre.errors import Stopped, UserError
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.recipe.recipe import Recipe
from pospre.recipe.sections import Trained
from pospre.run.checkpoints.folders import checkpoints_in
from pospre.run.resume import recorded
from pospre.run.run import Run, check_one_place
from pospre.training.announce import announce
from pospre.training.build import (
    Components,
    build_components,
    in_stages,
    with_sizes,
)
from pospre.training.callbacks.bad_steps import Divergence, LossSpikes
from pospre.training.callbacks.progress import ProgressBar
from pospre.training.callbacks.sleeping_heads import SleepingHeads
from pospre.training.callbacks.stalls import Stalls
from pospre.training.callbacks.stop_signals import StageEnd, StopSignals
from pospre.training.callbacks.watchers import WARNINGS, Collapse, PositionShortcut
from pospre.training.data import LoaderPosition
from pospre.training.loggers import build_metrics_file
from pospre.training.optimizer.gradients import GradientNorms, build_clipping
from pospre.training.precision import (
    composer_precision,
    uses_cudnn,
)
from pospre.training.reference import open_reference, store_reference, with_encoders
from pospre.training.scale.blocks import recompute_blocks, use_float8
from pospre.training.scale.compilation import Compiling, choose_parts, compile_model, open_cache
from pospre.training.scale.fsdp import MeanOverRanks, build_sharding
from pospre.training.scale.microbatch import microbatch_size, out_of_memory
from pospre.training.start import fit_heads, start_from
from pospre.training.step_trainer import StepTrainer


def train(recipe: Recipe, more_callbacks: Sequence[Callback] = ()) -> bool:
    """Train a recipe to its end, or resume it; return whether it was already finished."""
    with Run(with_encoders(recipe)) as run:
        return train_in(run, more_callbacks)


def train_in(run: Run, more_callbacks: Sequence[Callback] = ()) -> bool:
    """Train like ``train``, in an entered run; ``more_callbacks`` run before each save."""
    recipe = run.recipe
    reads_weights = recipe.encoder.weights is not None or recipe.reference is not None
    is_new = reads_weights and run.is_new()
    reference = open_reference(recipe, resumes=not is_new)
    parts = build_components(recipe, run.device, reference)
    estimate_memory(parts.loader).check()
    fresh: list[str] = []
    if recipe.encoder.weights is not None and is_new:
        said, fresh = start_from(parts)
        print_once(said)
    if is_new and (fitted := fit_heads(parts)) is not None:
        print_once(fitted)
    step = run.find(parts)
    if is_new:
        store_reference(recipe, parts.model.reference)
    parts = from_checkpoint(parts, run, step, fresh)
    began, is_over = step, step >= parts.total_steps
    if is_over:
        where = run.start and run.start.uri
        print_once(f"{recipe.run_name} is already finished ({where}); nothing to train")
    else:
        if parts.stages is not None:
            check_one_place(recipe)
        announce(parts, run.start, recipe.trainer.precision)
        step, is_over = _fit(parts, run, more_callbacks, step)
    while not is_over:  # a stage has ended; see ``_next_stage``
        parts = _next_stage(parts, run, step)
        step, is_over = _fit(parts, run, more_callbacks, step)
    run.finish_uploads()
    return step == began


def from_checkpoint(parts: Components, run: Run, step: int, fresh: list[str]) -> Components:
    """Return components with the stages of the run's checkpoint; ``fresh`` are a new run's."""
    if parts.stages is None:
        return parts
    start = run.start  # on rank 0
    before = from_rank_zero(lambda: start and recorded(start.content))
    starts, fresh = ([], fresh) if before is None else (before.starts, before.fresh)
    return in_stages(parts, starts, fresh, step)


def _next_stage(parts: Components, run: Run, step: int) -> Components:
    """Return components for the stage that begins at a step, as a resumed run would build them.

    DDP never reduces the gradient of a tensor that was frozen when DDP wrapped the model, Composer
    wraps once, and compiled code, FSDP2's hooks and the optimiser all belong to what was wrapped.
    So the end of a stage is a resume: all is saved, built anew, and read, and a run that was killed
    there differs in nothing.
    """
    run.find_again(step)
    reference = open_reference(parts.recipe, resumes=True)
    assert parts.stages is not None
    parts = with_sizes(parts, parts.stages.at(step), reference)
    gc.collect()  # the last stage's trainer, with its memory on the device
    return from_checkpoint(parts, run, step, [])


def _fit(
    parts: Components, run: Run, more_callbacks: Sequence[Callback], step: int
) -> tuple[int, bool]:
    """Train from a step, the run's latest, to the end of its stage.

    Return the step reached, and whether the run is over.
    """
    signals, stages = StopSignals(), parts.stages
    callbacks = [*more_callbacks, *run.begin(stages)]
    number = None if stages is None else stages.at(step)
    if stages is not None and number is not None:
        print_once(stages.describe(number))
    trainer = build_trainer(parts, signals=signals, callbacks=callbacks, stage=number)
    for needless in (
        "No batches were trained",  # when resuming at the very end of an epoch
        "The current world size",  # differs: no draw depends on a rank's own random state
        "FSDP2-wrapped module",  # returns a view: losses change no output in place
    ):
        warnings.filterwarnings("ignore", message=needless)
    try:
        trainer.fit()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the device ran out of memory in step {trainer.state.timestamp.batch.value + 1} "
            f"({error}). Use {out_of_memory(parts.recipe)}; the same command resumes from the "
            "last checkpoint"
        ) from error
    finally:
        signals.give_back()
        trainer.engine.close()  # trainer.close() would also wait for ranks, which may have failed
    dist.barrier()
    if signals.stopped is not None:
        # the others may have their own disks, without the files that complete a checkpoint
        step, local = trainer.state.timestamp.batch.value, str(parts.recipe.local_checkpoints())
        saved = from_rank_zero(lambda: next(x for x in checkpoints_in(local) if x.batch == step))
        raise Stopped(
            signals.stopped,
            f"after step {step} of {parts.total_steps}, saved in {saved.uri}; the same "
            "command resumes from there",
        )
    step = int(trainer.state.timestamp.batch.value)
    return step, signals.is_over or step >= parts.total_steps


def build_trainer(
    components: Components,
    *,
    signals: StopSignals,
    callbacks: Sequence[Callback] = (),
    stage: int | None = None,
) -> Trainer:
    """Return the trainer of a run, which ends when the process gets a signal, or after its stage.

    Without a saver among the ``callbacks``, such as those of ``Run.begin``, nothing is saved.
    """
    recipe, model, device = components.recipe, components.model, components.device
    options = recipe.trainer
    microbatch = microbatch_size(components)  # before anything below changes the model
    precision, casting = composer_precision(recipe, device)
    if options.float8:
        use_float8(model, device)
    compiled = _compile(model, recipe, device)
    if options.activation_checkpointing:
        recompute_blocks(model, offload=options.activation_checkpointing == "offload")
    if stage is not None:
        assert components.stages is not None
        components.stages.freeze(model, stage)  # before DDP looks which tensors have gradients
        callbacks = [*_stage_callbacks(components.stages, stage, recipe), *callbacks]
    sharding = build_sharding(options.fsdp)
    return StepTrainer(
        model=model,
        cudnn=uses_cudnn(recipe, device),
        casting=casting,
        train_dataloader=DataSpec(
            components.loader, get_num_samples_in_batch=lambda b: len(b["index"])
        ),
        max_duration=options.max_duration,
        algorithms=[
            *components.model.algorithms,
            *build_clipping(options.clip_grad),
            # last here is first once gradients are available: Composer reverses the order then
            *([GradientNorms(options.log_interval)] if recipe.callbacks.gradient_norms else []),
            *([MeanOverRanks()] if sharding and device.dist_backend == "gloo" else []),
        ],
        optimizers=components.optimizer,
        schedulers=components.schedule,
        step_schedulers_every_batch=True,
        callbacks=[*compiled, *_callbacks(components, signals, callbacks)],
        loggers=[build_metrics_file(recipe)],
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
    torch._dynamo.reset()  # it would count an earlier stage's code
    cache = open_cache()  # first: torch's own choice needs the user's name, which may be unknown
    compile_model(model, parts, device)
    return [Compiling(parts, cache)]


def _callbacks(
    components: Components, signals: StopSignals, more: Sequence[Callback]
) -> list[Callback]:
    recipe = components.recipe
    bar = [ProgressBar(components.total_steps)] if recipe.trainer.progress_bar else []
    return [
        signals,  # first: it decides whether a step is the last one
        *_watchers(recipe),
        LoaderPosition(components.loader),
        Divergence(recipe),
        *more,
        *bar,
    ]


def _stage_callbacks(stages: Stages, number: int, recipe: Recipe) -> list[Callback]:
    """Return what ends a stage, and checks its heads if nothing else has trained."""
    end = stages.end(number)
    if stages.options[number].train != Trained():
        return [StageEnd(end)]
    log = recipe.run_path() / WARNINGS
    return [StageEnd(end), SleepingHeads(end, recipe.data.batch_size, log)]


def _watchers(recipe: Recipe) -> list[Callback]:
    """Return the recipe's monitoring callbacks; their warnings go into the run's folder."""
    options, log = recipe.callbacks, recipe.run_path() / WARNINGS
    regularly = {"interval": recipe.trainer.log_interval}
    watchers: list[tuple[Callable[..., Callback], Section | None, dict[str, Any]]] = [
        (Stalls, options.stalls, regularly),
        (LossSpikes, options.loss_spikes, {"recipe": recipe}),
        (Collapse, options.collapse, regularly),
        (PositionShortcut, options.position_shortcut, regularly),
    ]
    return [kind(log=log, **more, **own.model_dump()) for kind, own, more in watchers if own]
