"""The checkpoint with the best figure so far, kept in ``checkpoints/best``.

The best follows from ``metrics.jsonl`` and the existing files, so a killed run finds the same one
again. Its files are hard links to those of the checkpoint, and survive when
``trainer.keep_checkpoints`` removes the originals. In a run's bucket it keeps its own name, so a
start on another machine finds it.
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
from pospre.run.checkpoints.folders import BEST, NOTE, checkpoints_in, remove, remove_checkpoints
from pospre.training.callbacks.metrics import read_lines


class BestCheckpoint:
    """Keeps the checkpoint with the best ``figure`` in ``metrics``; ties go to the first.

    Used on rank 0, also by the saving thread.
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
        """Return whether the figure of ``step`` is better than those of all existing files."""
        figures = self._figures()
        return self._best(figures, [step, *self._files(), *self._remote]) == step

    def look_into(self, bucket: str) -> None:
        """List a run's bucket: the best may exist only there."""
        self._remote = {each.batch: Path(each.uri).name for each in checkpoints_in(bucket)}

    def settle(self, _: Path | None = None) -> None:
        """Keep the best of the existing checkpoints; called after each new one."""
        with self._lock:
            figures, files = self._figures(), self._files()
            best = self._best(figures, [*files, *self._remote])
            if best is None:
                return
            self.folder.mkdir(exist_ok=True)
            source = files.get(best)
            if source is not None and source.parent != self.folder:
                with suppress(FileNotFoundError, shutil.Error):  # just replaced by a newer one
                    _link_checkpoint(source, self.folder / source.name)
            for other in checkpoints_in(str(self.folder)):
                if other.batch != best:
                    remove(Path(other.uri))
            kept = {"step": best, "figure": self.figure, "value": figures[best]}
            name = self._remote[best] if source is None else source.name
            write_json(self.folder / NOTE, {**kept, "checkpoint": name})

    def forget(self) -> None:
        """Remove the best checkpoint of an earlier run."""
        remove_checkpoints(str(self.folder))
        (self.folder / NOTE).unlink(missing_ok=True)

    def _best(self, figures: dict[int, float], steps: Iterable[int]) -> int | None:
        known = sorted(step for step in set(steps) if step in figures)
        return self._choose(known, key=figures.__getitem__) if known else None

    def _figures(self) -> dict[int, float]:
        """Return the figure by step."""
        values = ((line["step"], line.get(self.figure)) for line in read_lines(self.metrics))
        return {step: float(value) for step, value in values if isinstance(value, int | float)}

    def _files(self) -> dict[int, Path]:
        """Return the existing checkpoints by step; if there are two, the kept one."""
        checkpoints = [*checkpoints_in(str(self.checkpoints)), *checkpoints_in(str(self.folder))]
        return {checkpoint.batch: Path(checkpoint.uri) for checkpoint in checkpoints}


def _link_checkpoint(source: Path, target: Path) -> None:
    partial = target.with_name(target.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link)
    os.replace(partial, target)


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:  # also if it was just removed: then the copy raises the error
        shutil.copyfile(source, target)
