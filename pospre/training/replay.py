"""Replay of a bad step: from the last checkpoint before it, on the same samples."""

from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor

from pospre.batch import INDEX, Batch
from pospre.errors import UserError
from pospre.model.algorithm import Progress, pretrain_model, training_progress
from pospre.model.model import PretrainModel
from pospre.object_store import is_remote
from pospre.recipe.monitoring import Callbacks, Loggers
from pospre.recipe.recipe import Recipe, recorded_recipe
from pospre.recipe.yaml_text import VARIABLE, apply_overrides
from pospre.run.checkpoints.files import DamagedCheckpoint
from pospre.run.checkpoints.folders import checkpoint_folders, checkpoints_in
from pospre.run.checkpoints.reading import Checkpoint, read_checkpoint
from pospre.run.resume import Resume, recorded
from pospre.scratch import scratch
from pospre.training.build import build_components, in_stages
from pospre.training.callbacks.metrics import plain_losses
from pospre.training.callbacks.stop_signals import StopSignals
from pospre.training.reference import open_reference
from pospre.training.start import start_from
from pospre.training.train import build_trainer
from pospre.untrusted_json import parse_object


class Replay(NamedTuple):
    """A replayed step.

    Attributes:
        losses: losses of the repeated step.
        model: with the weights and the mode before the step.
        batch: the samples of the step, from all ranks, as the loader returns them.
        progress: progress of the training when the step began.
    """

    losses: dict[str, float]
    model: PretrainModel
    batch: Batch
    progress: Progress


def replay(path: str | Path, *overrides: str) -> Replay:
    """Train again, in this process, from the last checkpoint before a bad step through that step.

    Nothing is written into the run's folder. Buckets, and places from environment variables, are
    only read if ``overrides`` name them, because the file may be untrusted.

    Args:
        path: ``bad_steps/ba<step>.json`` of a run folder.
        overrides: ``key=value`` for its recipe, such as ``data.path=…``.

    Raises:
        UserError: the file is not a run's, an address must be named, or the data have changed.
    """
    path = Path(path)
    try:
        noted = parse_object(path.read_bytes())
        step, ranks = int(noted["step"]), noted["ranks"]
        written = noted["recipe"]
        apply_overrides(written, overrides)
        recipe = recorded_recipe(written, source=f"recipe in {path}")
        wanted = sorted(index for rank in ranks for index in rank[INDEX])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the record of a bad step ({error}); give the file that the message "
            "named"
        ) from error
    named = {item.partition("=")[0] for item in overrides}
    start = _checkpoint_before(step, path, recipe, named)
    _check_address("data.path", recipe.data.path, named)
    _check_address("data.labels", recipe.data.labels, named)
    if start is None:
        _check_address("encoder.weights", recipe.encoder.weights, named)
    if recipe.reference is not None:
        _check_address("reference.weights", recipe.reference.weights, named)
    with scratch() as folder:
        held = _train(_apart(recipe, str(folder)), start, step)
    samples = sorted(held.batch[INDEX].tolist())
    if samples != wanted:
        raise UserError(
            f"{path}: step {step} now has other samples ({samples[:3]}… instead of {wanted[:3]}…): "
            f"data.path = {recipe.data.path} has changed since"
        )
    return held


def _check_address(key: str, value: str | None, named: Set[str]) -> None:
    """Refuse a recorded bucket, or an address from a variable, that was not named."""
    if value is not None and key not in named and (is_remote(value) or VARIABLE.search(value)):
        raise UserError(f"{key} is recorded as {value!r}; give it, as in replay(…, '{key}=PLACE')")


def _checkpoint_before(step: int, path: Path, recipe: Recipe, named: Set[str]) -> Checkpoint | None:
    """Return the newest complete checkpoint before a step; None if there is none."""
    folders = [str(path.absolute().parents[1] / "checkpoints")]
    folders += [
        folder
        for folder in checkpoint_folders(recipe)
        if not is_remote(folder) or "trainer.save_folder" in named
    ]
    for checkpoint in checkpoints_in(*folders):
        if checkpoint.batch < step:
            try:
                return read_checkpoint(checkpoint.uri)
            except DamagedCheckpoint:
                continue
    return None


def _apart(recipe: Recipe, folder: str) -> Recipe:
    """Return the recipe for a replay on one process, without output or monitoring."""
    trainer = recipe.trainer.model_copy(
        update={
            "run_folder": folder,
            "save_folder": None,
            "keep_best": None,
            "progress_bar": False,
            "fsdp": None,
        }
    )
    quiet = Callbacks(
        loss_spikes=None, collapse=None, position_shortcut=None, stalls=None, gradient_norms=False
    )
    update = {"trainer": trainer, "callbacks": quiet, "loggers": Loggers(), "evaluation": {}}
    return recipe.model_copy(update=update)


def _train(recipe: Recipe, start: Checkpoint | None, step: int) -> Replay:
    run = build_components(recipe, reference=open_reference(recipe, resumes=False))
    fresh: list[str] = []
    if start is None and recipe.encoder.weights is not None:
        fresh = start_from(run)[1]
    name, begun = ("the start", 0) if start is None else (start.uri, start.batch)
    before = None if start is None else recorded(start.content)
    starts, fresh = ([], fresh) if before is None else (before.starts, before.fresh)
    run = in_stages(run, starts, fresh, begun)
    number = None if run.stages is None else run.stages.at(begun)
    if run.stages is not None and run.stages.end(run.stages.at(begun)) < step:
        raise UserError(
            f"step {step} is in a later stage than {name}, which is the newest checkpoint before "
            "it. Keep more (trainer.keep_checkpoints), or replay an earlier step"
        )
    print(f"replaying to step {step} from {name}")
    signals, held = StopSignals(), _Hold(step)
    entering = () if run.stages is None else run.stages.entering(begun)
    resume = [] if start is None else [Resume(start.content, entering)]
    trainer = build_trainer(run, signals=signals, callbacks=[*resume, held], stage=number)
    try:
        trainer.fit()
    except UserError:
        if not held.losses:  # otherwise the replayed step diverged again
            raise
    finally:
        signals.give_back()
        trainer.engine.close()
    run.model.load_state_dict(held.weights)
    assert held.progress is not None
    return Replay(held.losses, run.model, held.batch, held.progress)


class _Hold(Callback):
    """Keeps the state before a step, and its losses; ends the training after it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.weights: dict[str, Tensor] = {}
        self.batch: Batch = {}
        self.progress: Progress | None = None
        self.losses: dict[str, float] = {}

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step - 1:
            weights = pretrain_model(state).state_dict()
            self.weights = {name: value.to("cpu", copy=True) for name, value in weights.items()}
            self.batch = state.device.batch_to_device(state.batch)
            self.progress = training_progress(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step:
            self.losses = plain_losses(state.total_loss_dict)
            state.stop_training()
