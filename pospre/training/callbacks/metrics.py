"""The losses of a step, fetched once, and ``metrics.jsonl``: a JSON object per logged step.

The file is one curve, however often the run was killed.
"""

import json
import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from composer.core import Event, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from torch import Tensor

from pospre.atomic_file import write_atomic
from pospre.errors import UserError
from pospre.model.progress import training_progress
from pospre.untrusted_json import parse_steps

_SKIPPED = ("time/batch", "time/sample", "time/epoch", "time/token", "trainer/")  # Composer's
_AXES = ("step", "time")  # loggers record step and time themselves


class StepLosses(Mapping[str, float]):
    """Losses and metrics by name, means over all ranks.

    The first access waits until the device has computed them.
    """

    def __init__(self, losses: Mapping[str, Tensor]) -> None:
        self._names = list(losses)
        values = torch.cat([loss.reshape(1) for loss in losses.values()])
        dist.all_reduce(values)
        # into pinned memory, during the next step
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._losses: dict[str, float] | None = None

    @property
    def is_late(self) -> bool:
        """Whether access may wait, so that callbacks should read them one step later."""
        return self._losses is None and self._copied is not None

    def fetch(self) -> dict[str, float]:
        """Return all values, once the device has computed them."""
        if self._losses is None:
            if self._copied is not None:
                self._copied.synchronize()
            ranks, values = dist.get_world_size(), self._values.tolist()
            pairs = zip(self._names, values, strict=True)
            self._losses = {name: value / ranks for name, value in pairs}
        return self._losses

    def __getitem__(self, name: str) -> float:
        """Return a loss."""
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, without waiting."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of losses and metrics."""
        return len(self._names)


def is_late(losses: Mapping[str, float]) -> bool:
    """Return whether access to these losses would wait for the device."""
    return isinstance(losses, StepLosses) and losses.is_late


def wait_for(losses: Mapping[str, float]) -> None:
    """Wait until the device has computed these losses."""
    if isinstance(losses, StepLosses):
        losses.fetch()


def plain_name(name: str) -> str:
    """Return our name of a value logged by Composer: ``loss/mae``, ``metric/accuracy``."""
    term = name.removeprefix("loss/train/")
    return term if term == name or term.startswith("metric/") else f"loss/{term}"


def plain_losses(losses: Mapping[str, float]) -> dict[str, float]:
    """Return the losses and metrics of a step under our names."""
    return {plain_name(name): value for name, value in losses.items()}


class MetricsFile(LoggerDestination):
    """Writes step, epoch, samples, time, lr, throughput, memory, losses and metrics.

    ``step`` counts finished steps, ``epoch`` is the one they belong to (from 0), ``time`` is in
    seconds since 1970, ``throughput`` in samples per second since the previous line. ``memory`` is
    the process's peak so far, in GiB: of the GPU (``memory_reserved`` includes torch's allocator),
    or without one of the machine. A value that is not finite is ``null``.

    Args:
        path: the file; only rank 0 writes.
        interval: steps between lines.
        others: further loggers by name; each gets the values of every line, and nothing else.
    """

    def __init__(
        self, path: Path, interval: int, others: Mapping[str, LoggerDestination] | None = None
    ) -> None:
        self.path = path
        self.interval = interval
        self.others = dict(others or {})
        self.values: dict[str, float] = {}
        self.last = (0.0, 0)
        self._unwritten: tuple[dict[str, float], Mapping[str, float]] | None = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Forward the trainer's events: Composer only has this logger."""
        super().run_event(event, state, logger)
        for name, other in self.others.items():
            try:
                other.run_event(event, state, logger)
            except Exception as error:
                if event == Event.INIT:
                    raise UserError(f"loggers.{name} cannot start: {error}") from error
                raise

    def fit_start(self, state: State, logger: Logger) -> None:
        """Drop the lines of steps that will be trained again."""
        self.last = (time.monotonic(), state.timestamp.sample.value)
        if dist.get_global_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_after(self.path, state.timestamp.batch.value)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Store the (highest) learning rate of this step; at its end the schedule has advanced."""
        self.values["lr"] = max(float(group["lr"]) for group in state.optimizers[0].param_groups)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Store values until the step's line is written."""
        for name, value in metrics.items():
            if not name.startswith(_SKIPPED):
                self.values[plain_name(name)] = float(value)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Forward what Composer and its loggers record about a run."""
        for other in self.others.values():
            other.log_hyperparameters(hyperparameters)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write a line every ``interval`` steps, at the end, and if the loss is not finite."""
        step, losses = state.timestamp.batch.value, state.total_loss_dict
        self.before_save(state)
        # Composer counts an epoch as done only after its last batch has ended
        is_last = training_progress(state).step >= 1
        if step % self.interval == 0 or step == 1 or is_last:
            losses = dict(losses)  # throughput counts the wait for them
            self._write(state, self._line(state), losses)
        else:
            self._unwritten = self._line(state), losses
            if not is_late(losses):
                self.before_save(state)
        self.values = {}

    def before_save(self, state: State) -> None:
        """Write the line of the last step if it has none and its loss is not finite."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None and not math.isfinite(unwritten[1].get("loss/train/total", 0.0)):
            self._write(state, *unwritten)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Write the line before other callbacks check the last step."""
        self.before_save(state)

    def add_line(self, state: State, values: Mapping[str, float], seconds: float) -> None:
        """Write a separate line about the finished step.

        Args:
            state: state of the training.
            values: the measured values, by name.
            seconds: duration of the pause of training, which throughput excludes.
        """
        time_now = state.timestamp
        line = {
            "step": time_now.batch.value,
            "epoch": max(0, time_now.epoch.value - (time_now.batch_in_epoch.value == 0)),
            "samples": time_now.sample.value,
            "time": round(time.time(), 3),
            **values,
        }
        self.last = (self.last[0] + seconds, self.last[1])
        self._append(line)

    def close(self, state: State, logger: Logger) -> None:
        """Close the other loggers."""
        for other in self.others.values():
            other.close(state, logger)

    def post_close(self) -> None:
        """Wait until the other loggers have finished their uploads."""
        for other in self.others.values():
            other.post_close()

    def _line(self, state: State) -> dict[str, float]:
        """Return the known values of the finished step, without waiting for it."""
        now, samples = time.monotonic(), state.timestamp.sample.value
        throughput = (samples - self.last[1]) / max(now - self.last[0], 1e-9)
        return {
            "step": state.timestamp.batch.value,
            "epoch": state.timestamp.epoch.value,
            "samples": samples,
            "time": round(time.time(), 3),
            "throughput": round(throughput, 2),
            **self.values,
        }

    def _write(self, state: State, line: Mapping[str, float], losses: Mapping[str, float]) -> None:
        self.last = (time.monotonic(), int(line["samples"]))
        self._append({**line, **_peak_memory(state), **plain_losses(losses)})

    def _append(self, line: Mapping[str, Any]) -> None:
        if dist.get_global_rank() == 0:
            valid = {key: value if math.isfinite(value) else None for key, value in line.items()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(valid, allow_nan=False) + "\n")
        row = {key: value for key, value in line.items() if key not in _AXES}
        for other in self.others.values():
            other.log_metrics(row, line["step"])


def _peak_memory(state: State) -> dict[str, float]:
    if state.device.name == "gpu":
        held = {
            "memory": torch.cuda.max_memory_allocated(),
            "memory_reserved": torch.cuda.max_memory_reserved(),
        }
    else:  # Linux counts in KiB
        held = {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
    return {name: round(num_bytes / 2**30, 3) for name, num_bytes in held.items()}


def drop_after(path: Path, step: int) -> None:
    """Rewrite a metrics file without the lines after ``step`` and without damaged ones."""
    if path.exists():
        write_lines(path, [line for line in read_lines(path) if line["step"] <= step])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of steps, see ``parse_steps``; empty if it does not exist."""
    return parse_steps(path.read_bytes()) if path.exists() else []


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with one object per line, atomically."""
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
