"""``metrics.jsonl``: one JSON object per logged step; one curve, however often killed."""

import json
import os
import time
from pathlib import Path
from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

_SKIPPED = ("time/", "trainer/")


def plain_name(name: str) -> str:
    """Return our name of a value that Composer logs: ``loss/mae``, ``metric/accuracy``."""
    term = name.removeprefix("loss/train/")
    return term if term == name or term.startswith("metric/") else f"loss/{term}"


class MetricsFile(LoggerDestination):
    """Writes step, epoch, samples, time, lr, throughput, losses and metrics.

    ``step`` counts finished steps, ``epoch`` is the one they belong to (from 0), ``time`` is in
    seconds since 1970, ``throughput`` in samples per second since the line before.

    Args:
        path: the file; only rank 0 writes.
        interval: steps between lines.
    """

    def __init__(self, path: Path, *, interval: int) -> None:
        self.path = path
        self.interval = interval
        self.values: dict[str, float] = {}
        self.last = (0.0, 0)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Drop the lines of steps that will be trained again."""
        self.last = (time.monotonic(), state.timestamp.sample.value)
        if dist.get_global_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_after(self.path, state.timestamp.batch.value)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Keep the (highest) learning rate of this step; at its end the schedule has moved on."""
        self.values["lr"] = max(float(group["lr"]) for group in state.optimizers[0].param_groups)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep values until the step's line is written."""
        for name, value in metrics.items():
            if not name.startswith(_SKIPPED):
                self.values[plain_name(name)] = float(value)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write a line every ``interval`` steps and at the end."""
        step = state.timestamp.batch.value
        done = state.max_duration is not None and state.timestamp >= state.max_duration
        if dist.get_global_rank() == 0 and (step % self.interval == 0 or step == 1 or done):
            self._write(state, step)
        self.values = {}

    def _write(self, state: State, step: int) -> None:
        now, samples = time.monotonic(), state.timestamp.sample.value
        line = {
            "step": step,
            "epoch": state.timestamp.epoch.value,
            "samples": samples,
            "time": round(time.time(), 3),
            "throughput": round((samples - self.last[1]) / max(now - self.last[0], 1e-9), 2),
            **self.values,
        }
        self.last = (now, samples)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def drop_after(path: Path, step: int) -> None:
    """Rewrite a metrics file without the lines after ``step`` and without a half-written one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:  # the kill came in the middle of this line
            continue
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
