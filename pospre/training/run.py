"""One run from start to end: where to go on, training, and what follows it."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback
from composer.utils import dist

from pospre.data.memory import estimate_memory
from pospre.data.stores.identity import difference
from pospre.data.traffic import describe_traffic
from pospre.errors import Stopped, UserError
from pospre.object_store import check_writable, is_remote
from pospre.recipe.recipe import Recipe
from pospre.schedules import duration_steps
from pospre.training.build import Components, build_components
from pospre.training.callbacks.resume import Resume
from pospre.training.callbacks.stop_signals import StopSignals
from pospre.training.checkpoints.content import (
    compare_tensors,
    recorded,
    recorded_fingerprints,
    recorded_identity,
)
from pospre.training.checkpoints.finding import (
    checkpoint_folders,
    checkpoints_in,
    checkpoints_of,
)
from pospre.training.checkpoints.mirror import restore_run
from pospre.training.checkpoints.reading import Checkpoint, open_newest, read_on_every_rank
from pospre.training.checkpoints.sight import check_sight
from pospre.training.checkpoints.uploads import Uploads, lacks
from pospre.training.checkpoints.versions import warn_of_other_versions
from pospre.training.device import describe_precision, slow_precision
from pospre.training.distributed.agreement import check_data
from pospre.training.distributed.place import is_restart
from pospre.training.distributed.ranks import from_rank_zero, however_long, print_once
from pospre.training.run_folder import check_folder, clear, write_recipe
from pospre.training.same_recipe import compare_recipes
from pospre.training.scale.microbatch import out_of_memory
from pospre.training.start_weights import load_weights
from pospre.training.trainer import build_trainer


def train(recipe: Recipe, more_callbacks: Sequence[Callback] = ()) -> bool:
    """Train a recipe to its end, or go on where it stopped; tell whether it was finished before.

    Args:
        recipe: what to train.
        more_callbacks: see ``build_trainer``.
    """
    folder = recipe.checkpoint_folder()
    if is_remote(folder) and dist.get_global_rank() == 0:
        check_writable(folder)  # before anything slow
    run = build_components(recipe)
    memory = estimate_memory(run.loader)
    memory.check()
    check_data(run.recipe, run.loader.num_samples, run.loader.identity)
    _start_weights(run)
    start = however_long(lambda: open_run(run) if dist.get_global_rank() == 0 else None)
    uploads = _uploads(recipe)
    with uploads or nullcontext():
        start = however_long(
            lambda: start if start is None or uploads is None else in_bucket(start, uploads)
        )
        steps = from_rank_zero(lambda: 0 if start is None else start.batch)
        if steps >= run.total_steps:
            print_once(
                f"{recipe.run_name} is already finished ({start and start.uri}); nothing to train"
            )
            return True
        check_sight(recipe)
        traffic = describe_traffic(run.loader)
        if traffic is not None and dist.get_local_rank() == 0:
            print(traffic, flush=True)
        if memory.is_tight:
            print_once(memory.describe())
        slow = slow_precision(run.recipe, run.device)
        if slow is not None:
            print_once(slow)
        print_once(_describe(run, recipe.trainer.precision))
        fit(run, start, uploads, more_callbacks)
    return False


def _describe(run: Components, precision: str) -> str:
    """Say in a line what is about to be trained, where it goes, and how to stop it."""
    recipe, ranks = run.recipe, dist.get_world_size()
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    device = run.device.name if ranks == 1 else f"{ranks} × {run.device.name}"
    precision = describe_precision(precision, recipe.trainer.precision, run.device)
    return (
        f"{recipe.run_name}: {recipe.encoder.name} with {' + '.join(recipe.algorithms)}, "
        f"{parameters / 1e6:.1f} M parameters, on {device} in {precision}; "
        f"{run.loader.num_samples} images, {run.total_steps} steps of "
        f"{recipe.data.batch_size}, into {recipe.run_path()}. Ctrl-C saves and stops; the same "
        "command goes on"
    )


def _start_weights(run: Components) -> None:
    """Load ``encoder.weights``, unless a checkpoint of this very run is there to go on from."""
    recipe = run.recipe
    if recipe.encoder.weights is None:
        return
    if from_rank_zero(lambda: _starts_over(recipe) or not checkpoints_of(recipe)):
        print_once(load_weights(run.model, recipe.encoder.weights, recipe.encoder.weights_from))


def _uploads(recipe: Recipe) -> Uploads | None:
    """Return what carries checkpoints into the run's bucket, on the ranks that write them."""
    folder, sharded = recipe.checkpoint_folder(), recipe.trainer.checkpoint == "sharded"
    if not is_remote(folder) or (dist.get_global_rank() > 0 and not sharded):
        return None
    return Uploads(recipe.run_path(), folder, keep=recipe.trainer.keep_remote)


def in_bucket(start: Checkpoint, uploads: Uploads) -> Checkpoint:
    """Upload a local checkpoint that the bucket lacks; wait for it if other nodes must read it."""
    if is_remote(start.uri):
        return start
    path = Path(start.uri)
    if lacks(uploads.remote, path):
        uploads.offer(path)
    if dist.get_world_size() == dist.get_local_world_size():
        return start
    missing = uploads.finish()
    if missing is not None:
        raise missing
    return start._replace(uri=f"{uploads.remote.rstrip('/')}/{path.name}")


def fit(
    run: Components,
    start: Checkpoint | None,
    uploads: Uploads | None,
    more_callbacks: Sequence[Callback] = (),
) -> None:
    """Train from ``start`` (which rank 0 has read), or from nothing, to the end of the recipe."""
    earlier = from_rank_zero(lambda: [] if start is None else _earlier(run.recipe, start))
    content = read_on_every_rank(start)
    signals = StopSignals()
    trainer = build_trainer(
        run,
        signals=signals,
        resume=None if content is None else Resume(content),
        earlier=earlier,
        uploads=uploads,
        more_callbacks=more_callbacks,
    )
    if start is not None:
        print_once(f"going on from {start.uri}")
    for needless in (
        "No batches were trained",  # of an epoch at whose very end the run goes on
        "The current world size",  # is another: no draw depends on a rank's own random state
    ):
        warnings.filterwarnings("ignore", message=needless)
    try:
        trainer.fit()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the device ran out of memory in step {trainer.state.timestamp.batch.value + 1} "
            f"({error}). Use {out_of_memory(run.recipe)}; the same command goes on from the last "
            "checkpoint"
        ) from error
    finally:
        signals.give_back()
        trainer.engine.close()  # trainer.close() would also wait for ranks, and one may have failed
    dist.barrier()
    if signals.stopped is not None:
        # the others may have disks of their own, without what makes files a checkpoint
        step, local = trainer.state.timestamp.batch.value, str(run.recipe.local_checkpoints())
        saved = from_rank_zero(lambda: next(x for x in checkpoints_in(local) if x.batch == step))
        raise Stopped(
            signals.stopped,
            f"after step {step} of {run.total_steps}, saved in {saved.uri}; the same "
            "command goes on from there",
        )


def _earlier(recipe: Recipe, start: Checkpoint) -> list[Path]:
    """Return the local checkpoints up to ``start``, oldest first."""
    local = checkpoints_in(str(recipe.local_checkpoints()))
    return [Path(found.uri) for found in reversed(local) if found.batch <= start.batch]


def open_run(run: Components) -> Checkpoint | None:
    """Make or check the run's folder and return the checkpoint to go on from, if any.

    Nothing is written before everything is checked.

    Raises:
        UserError: the bucket does not work, or the folder or its checkpoints are of another run.
    """
    recipe, folder = run.recipe, run.recipe.checkpoint_folder()
    if _starts_over(recipe):
        clear(recipe)
    check_folder(recipe)
    start = open_newest(checkpoint_folders(recipe))
    if start is not None:
        _check_checkpoint(run, start)
    write_recipe(recipe, run.algorithms)
    if start is not None and is_remote(start.uri):
        restore_run(recipe.run_path(), folder)
    return start


def _starts_over(recipe: Recipe) -> bool:
    """Tell whether to delete an earlier run: who gave the command wants it, not who repeats it."""
    return recipe.trainer.overwrite and not is_restart()


def _check_checkpoint(run: Components, start: Checkpoint) -> None:
    recipe = run.recipe
    if not recipe.trainer.autoresume:
        raise UserError(
            f"{start.uri} exists and trainer.autoresume is false; use trainer.autoresume=true to "
            "go on, trainer.overwrite=true to start again, or another run_name"
        )
    state: dict[str, Any] = start.content["state"]
    for key in ("model", "optimizers", "schedulers", "timestamp"):
        if key not in state:
            raise UserError(f"{start.uri} holds weights only (no '{key}'): no run goes on from it")
    previous, num_samples = recorded(start.content)
    if start.batch > run.total_steps:
        raise UserError(
            f"trainer.max_duration = {recipe.trainer.max_duration} is {run.total_steps} steps, "
            f"but {start.uri} is trained for {start.batch}; give at least {start.batch}ba, or "
            "choose another run_name"
        )
    compare_recipes(previous, recipe, start.uri, recorded_fingerprints(start.content))
    if num_samples != run.loader.num_samples:
        raise UserError(
            f"{start.uri} was trained on {num_samples} images, but data.path = "
            f"{recipe.data.path} holds {run.loader.num_samples}; choose another run_name"
        )
    if other := difference(recorded_identity(start.content), run.loader.identity):
        raise UserError(
            f"{start.uri} was trained on other data ({previous['data']['path']}) than data.path = "
            f"{recipe.data.path} holds: {other}. Give the data that the run began with, or choose "
            "another run_name"
        )
    compare_tensors(run.model.state_dict(), state["model"], start.uri)
    warn_of_other_versions(start.content, start.uri)
    _say_length(run, start, previous["trainer"]["max_duration"])


def _say_length(run: Components, start: Checkpoint, before: str) -> None:
    """Say what becomes of the schedules where the run goes on with another length."""
    now, batch_size = run.recipe.trainer.max_duration, run.recipe.data.batch_size
    steps = duration_steps(before, steps_per_epoch=len(run.loader), batch_size=batch_size)
    if steps == run.total_steps or start.batch >= run.total_steps:
        return
    scheduler = start.content["state"]["schedulers"][type(run.schedule).__name__]
    pairs = zip(run.schedule.base_lrs, run.schedule.lr_lambdas, strict=True)
    rate = max(peak * share(start.batch) for peak, share in pairs)
    print_once(
        f"trainer.max_duration was {before}, is {now}: from step {start.batch + 1} on all "
        f"schedules are those of {run.total_steps} steps instead of {steps}; the learning rate "
        f"is {rate:.3g} there, it would have been {max(scheduler['_last_lr']):.3g}"
    )
