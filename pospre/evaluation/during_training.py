"""Evaluations of a recipe with ``every``: run during training, with the model in memory.

Each measures a full copy of the model, in float32, exactly as ``python -m pospre.evaluate`` would
measure the checkpoint of that step. The copy is made on the first rank; the others send their
shards and wait. The training's random states and weights are untouched, so its losses do not
change. The untrained baseline never changes, and is measured only at the end.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from signal import Signals
from typing import Any, TypeVar

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm

from pospre.collectives import from_rank_zero, while_others_wait
from pospre.errors import UserError
from pospre.evaluation.best_checkpoint import BestCheckpoint
from pospre.evaluation.early_stop import look_steps, reason_to_stop
from pospre.evaluation.planned import Planned, planned_evaluations
from pospre.evaluation.recipe_evaluations import best_figure, measure_checkpoint
from pospre.evaluation.registry import default_settings, evaluation_module, figures_of
from pospre.object_store import is_remote
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.reading import Checkpoint
from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.run.resume import RecipeRecord
from pospre.schedules import duration_steps
from pospre.training.callbacks.metrics import MetricsFile, drop_after, read_lines
from pospre.training.callbacks.stop_signals import StageEnd, StopSignals
from pospre.training.callbacks.watchers import WARNINGS, note

_FAILURES = (UserError, OSError, torch.OutOfMemoryError)

Kind = TypeVar("Kind")


class _Signalled(Exception):
    """The process received a signal: abandon the current evaluation."""


def online_evaluations(recipe: Recipe) -> list[Callback]:
    """Return the callback that evaluates during training, if the recipe has such evaluations."""
    planned = planned_evaluations(recipe)
    entries = [e for e in planned if e.every or e.at_start or e.at_stages or e.may_stop]
    return [OnlineEvaluations(recipe, entries)] if entries else []


class OnlineEvaluations(Callback):
    """Evaluates at regular steps and after the last, before that step is saved.

    The recipe says what is due at a step, and ``metrics.jsonl`` what is done. So a resumed run
    repeats nothing and skips nothing. A failed evaluation gives a warning, and training continues.
    At SIGTERM or Ctrl-C it is postponed to the next start.
    """

    def __init__(self, recipe: Recipe, entries: Sequence[Planned]) -> None:
        self.recipe, self.entries = recipe, entries
        self.metrics = recipe.run_path() / "metrics.jsonl"
        self.best: BestCheckpoint | None = None
        self._waits_for_epoch = False
        self._troubles: dict[str, set[str]] = {}  # at the last look, by evaluation
        figure = best_figure(recipe)
        if figure is not None:
            self.best = BestCheckpoint(self.metrics, recipe.local_checkpoints(), *figure)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Run evaluations that the last stop postponed."""
        step = state.timestamp.batch.value
        if self.best is not None:
            # first: the uploader asks for the best checkpoint
            _neighbour(state, CheckpointSaver).after_save.insert(0, self.best.settle)
        from_rank_zero(lambda: self._go_back_to(step))
        self._run(state, is_saved=True)
        self._end_if_worse(state)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Evaluate if due; always before this step is saved."""
        self._run(state)
        self._end_if_worse(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Update the best checkpoint after an epoch, whose checkpoint counts the epoch."""
        if self._waits_for_epoch:
            self._keep(state)

    def _go_back_to(self, step: int) -> None:
        """Remove results of steps that will be trained again; of a new run, all that there are."""
        for file in (self.metrics, *{each.history for each in self.entries}):
            drop_after(file, step or -1)  # an earlier try may have had another start
        if self.best is None:
            return
        if step == 0:
            self.best.forget()
        else:
            if is_remote(self.recipe.checkpoint_folder()):
                self.best.look_into(self.recipe.checkpoint_folder())
            self.best.settle()

    def _run(self, state: State, *, is_saved: bool = False) -> None:
        """Run evaluations due at this step, and keep its checkpoint if it is the best one.

        The step that this start resumed from already has a checkpoint, which must not be replaced:
        its random state is only restored with the first batch.
        """
        step, signals = state.timestamp.batch.value, _neighbour(state, StopSignals)
        planned = [entry for entry in self.entries if self._is_due(entry, state)]
        if not planned or signals.stopped is not None:
            return
        due = from_rank_zero(lambda: [entry for entry in planned if not self._is_done(entry, step)])
        if not due:
            return
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        snapshot = self._snapshot(state, get_model_state_dict(state.model, options=whole))
        for entry in due:
            signal = self._measure(entry, snapshot, state, signals)
            if signal is not None:
                signals.follow(signal, state)
                return
        best = self.best
        if best is not None and from_rank_zero(lambda: best.is_best(step)):
            if is_saved:
                from_rank_zero(best.settle)
            elif state.timestamp.batch_in_epoch.value == _length(state):
                self._waits_for_epoch = True
            else:
                self._keep(state)

    def _end_if_worse(self, state: State) -> None:
        """End the run if the recipe wants it, and the last looks found the encoder worse."""
        step, verdict = state.timestamp.batch.value, self.recipe.verdict
        entry = next((each for each in self.entries if each.may_stop), None)
        if entry is None or verdict is None or step not in look_steps(self._last(state)):
            return
        last = self._last(state)
        reason = from_rank_zero(lambda: reason_to_stop(verdict, entry.history, step, last))
        if reason is None:
            return
        if dist.get_global_rank() == 0:
            tqdm.write(f"step {step}: {reason}", file=sys.stderr)
            note(self.recipe.run_path() / WARNINGS, step, entry.name, reason)
        _neighbour(state, StopSignals).end(state)

    def _keep(self, state: State) -> None:
        assert self.best is not None
        self._waits_for_epoch = False
        _neighbour(state, CheckpointSaver).save(state)
        from_rank_zero(self.best.settle)

    def _is_due(self, entry: Planned, state: State) -> bool:
        step, batch_size = state.timestamp.batch.value, self.recipe.data.batch_size
        if entry.at_start:
            return step == 0
        if self._is_last(state) or (entry.at_stages and step in self._stage_ends(state)):
            return True
        if entry.may_stop and step in look_steps(self._last(state)):
            return True
        if entry.every is None:
            return False
        count, unit = int(entry.every[:-2]), entry.every[-2:]
        if unit == "sp":
            return step * batch_size // count > max(step - 1, 0) * batch_size // count
        return step > 0 and step % self._steps(entry.every, state) == 0

    def _stage_ends(self, state: State) -> set[int]:
        """Return the step before the first stage, and the one that ends the current stage."""
        ends = (each.step for each in state.callbacks if isinstance(each, StageEnd))
        return {0, *ends}

    def _is_last(self, state: State) -> bool:
        return bool(state.timestamp.batch.value == self._last(state))

    def _last(self, state: State) -> int:
        return self._steps(self.recipe.trainer.max_duration, state)

    def _steps(self, duration: str, state: State) -> int:
        batch_size = self.recipe.data.batch_size
        return duration_steps(duration, steps_per_epoch=_length(state), batch_size=batch_size)

    def _is_done(self, entry: Planned, step: int) -> bool:
        start = f"{entry.prefix}/"
        lines = (line for line in read_lines(self.metrics) if line["step"] == step)
        return any(name.startswith(start) for line in lines for name in line)

    def _snapshot(self, state: State, weights: dict[str, Any]) -> Checkpoint:
        """Return the checkpoint that an evaluation of this step would load."""
        record = _neighbour(state, RecipeRecord).state_dict()
        content = {"model": weights, "callbacks": {"RecipeRecord": record}}
        return Checkpoint(str(self.recipe.run_path()), "", {"state": content})

    def _measure(
        self, entry: Planned, snapshot: Checkpoint, state: State, signals: StopSignals
    ) -> Signals | None:
        """Run an evaluation and log its figures; return the signal that stopped it, if any."""
        step, began = state.timestamp.batch.value, time.monotonic()

        def work(go_on: Callable[[], None]) -> tuple[Signals | None, dict[str, float]]:
            def listen() -> None:
                go_on()
                if signals.seen is not None:
                    raise _Signalled

            figures: dict[str, Any] = {}
            try:
                results = self._evaluate(entry, snapshot, state, listen)
                figures = {key: results.get(key) for key in figures_of(entry.name)}
                self._warn(entry.name, step, results)
            except _Signalled:
                return signals.seen, {}
            except _FAILURES as error:
                print(
                    f"warning: evaluation.{entry.name} after step {step} failed; training "
                    f"continues: {error}",
                    file=sys.stderr,
                )
            return None, {key: value for key, value in figures.items() if value is not None}

        signal, figures = while_others_wait(work, state.device)
        if signal is None:
            seconds = time.monotonic() - began
            figures = {**figures, "seconds": round(seconds, 3)}
            values = {f"{entry.prefix}/{key}": value for key, value in figures.items()}
            _neighbour(state, MetricsFile).add_line(state, values, seconds)
        return signal

    def _warn(self, name: str, step: int, results: dict[str, Any]) -> None:
        """Print and keep a line for each sign of trouble that the last look did not have."""
        module = evaluation_module(name)
        warnings = module.alarms(results) if hasattr(module, "alarms") else []
        before, self._troubles[name] = self._troubles.get(name, set()), {*map(_trouble, warnings)}
        for warning in warnings:
            if _trouble(warning) in before:
                continue
            tqdm.write(f"warning: step {step}: {name}: {warning}", file=sys.stderr)
            note(self.recipe.run_path() / WARNINGS, step, name, warning)

    def _evaluate(
        self, entry: Planned, snapshot: Checkpoint, state: State, go_on: Callable[[], None]
    ) -> dict[str, Any]:
        """Return the results of an evaluation, once its file and history are written."""
        looked = entry.look()
        step, settings = state.timestamp.batch.value, dict(looked.settings)
        if not self._is_last(state) and "baseline" in default_settings(entry.name):
            settings["baseline"] = False
        with unchanged_random_state():
            options = {"progress": False, "step": step, "go_on": go_on}
            changed = looked._replace(settings=settings)
            document = measure_checkpoint(changed, self.recipe, snapshot, **options)
        entry.note(document)
        return document["results"]


def _trouble(warning: str) -> str:
    """Return what a warning is about, without its numbers."""
    return warning.partition(":")[0]


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch afterwards."""
    python, numbers = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def _length(state: State) -> int:
    """Return the number of steps in an epoch."""
    assert state.dataloader_len is not None
    return int(state.dataloader_len)


def _neighbour(state: State, kind: type[Kind]) -> Kind:
    """Return the run's callback of class ``kind``."""
    return next(callback for callback in state.callbacks if isinstance(callback, kind))
