"""The checkpoint with the best figure so far, kept in ``checkpoints/best``.

What is best follows from ``metrics.jsonl`` and from the files that are there, so that a run killed
at any moment finds the same one again. The file is a second name (hard link) of the checkpoint,
which stays when the first one goes its way after ``trainer.keep_checkpoints``. In a run's bucket it
stays under its own name, also for a start on a machine that has not seen it.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pospre.atomic_file import PARTIAL
from pospre.evaluation.run import write_json
from pospre.run.checkpoints.file import manifest_of
from pospre.run.checkpoints.finding import (
    BEST,
    NOTE,
    checkpoints_in,
    remove,
    remove_checkpoints,
)
from pospre.training.callbacks.metrics import read_lines


class BestCheckpoint:
    """Keeps one checkpoint of a run; used on rank 0, also by the thread that saves.

    Args:
        metrics: the run's ``metrics.jsonl``.
        checkpoints: the local folder of its checkpoints.
        figure: what decides, as it is called in ``metrics.jsonl``.
        better: whether the greatest or the smallest is best; of equal ones the first.
    """

    def __init__(
        self, metrics: Path, checkpoints: Path, figure: str, better: Literal["max", "min"]
    ) -> None:
        self.metrics, self.checkpoints, self.figure = metrics, checkpoints, figure
        self.folder = checkpoints / BEST
        self._remote: dict[int, str] = {}
        self._choose: Callable[..., int] = max if better == "max" else min
        self._lock = threading.Lock()

    def is_best(self, step: int) -> bool:
        """Tell whether the figure of ``step`` is better than those of all files that are there."""
        figures = self._figures()
        return self._best(figures, [step, *self._files(), *self._remote]) == step

    def look_into(self, bucket: str) -> None:
        """Find what a run's bucket has: the best may be there alone."""
        self._remote = {found.batch: Path(found.uri).name for found in checkpoints_in(bucket)}

    def settle(self, _: Path | None = None) -> None:
        """Keep the best of the checkpoints that are there; called after each new one."""
        with self._lock:
            figures, files = self._figures(), self._files()
            best = self._best(figures, [*files, *self._remote])
            if best is None:
                return
            self.folder.mkdir(exist_ok=True)
            source = files.get(best)
            if source is not None and source.parent != self.folder:
                with suppress(FileNotFoundError, shutil.Error):  # it has just gone for a newer one
                    _link_checkpoint(source, self.folder / source.name)
            for other in checkpoints_in(str(self.folder)):
                if other.batch != best:
                    remove(Path(other.uri))
            kept = {"step": best, "figure": self.figure, "value": figures[best]}
            name = self._remote[best] if source is None else source.name
            write_json(self.folder / NOTE, {**kept, "checkpoint": name})

    def forget(self) -> None:
        """Remove what a run before has kept."""
        remove_checkpoints(str(self.folder))
        (self.folder / NOTE).unlink(missing_ok=True)

    def _best(self, figures: dict[int, float], steps: Iterable[int]) -> int | None:
        known = sorted(step for step in set(steps) if step in figures)
        return self._choose(known, key=figures.__getitem__) if known else None

    def _figures(self) -> dict[int, float]:
        """Return the figure by step."""
        found = {}
        for line in read_lines(self.metrics):
            if isinstance(line.get(self.figure), int | float):
                found[line["step"]] = float(line[self.figure])
        return found

    def _files(self) -> dict[int, Path]:
        """Return the checkpoints that are there by step; where there are two, the one kept."""
        found = [*checkpoints_in(str(self.checkpoints)), *checkpoints_in(str(self.folder))]
        return {checkpoint.batch: Path(checkpoint.uri) for checkpoint in found}


def _link_checkpoint(source: Path, target: Path) -> None:
    if source.is_dir():
        partial = target.with_name(target.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, copy_function=lambda a, b: _link(Path(a), Path(b)))
        os.replace(partial, target)
    else:
        _link(manifest_of(source), manifest_of(target))
        _link(source, target)  # last: then all is there


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or a copy where the file system has no such names."""
    partial = target.with_name(target.name + PARTIAL)
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:  # also where it has just gone: then the copy says so
        shutil.copyfile(source, partial)
    os.replace(partial, target)
