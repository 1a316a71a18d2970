"""Saves checkpoints on the local disk while training.

Composer's own saver leaves a partial file under its final name when the disk is full, and its
uploader takes the run down with the bucket. Here a save is a local file, whole or not there; what
carries it into a bucket (``uploads.py``) hangs on ``after_save``.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist, reproducibility

from pospre.data.memory import readable
from pospre.errors import UserError
from pospre.training.checkpoints.file import CHECKPOINT_NAME, PARTIAL, manifest_of, write_checkpoint
from pospre.training.checkpoints.versions import versions
from pospre.training.ranks import from_rank_zero


class CheckpointSaver(Callback):
    """Saves every ``interval`` and at the end; keeps the last ``keep`` files.

    Content and names are those of Composer's saver, whose name it bears because Composer stores
    the state of callbacks by class: old checkpoints load here, and these there.

    Args:
        folder: local folder of the checkpoints.
        interval: between two saves, such as ``1ep`` or ``100ba``.
        keep: files to keep; -1 keeps all. The oldest go, and only once a newer one is whole.
        earlier: checkpoints of an earlier start, oldest first; they count for ``keep``.

    Attributes:
        before_save: called on every rank with the state before anything is written; one that
            raises stops the save.
        after_save: called on rank 0 with the path of every new checkpoint.
    """

    def __init__(
        self, folder: Path, *, interval: str, keep: int, earlier: Sequence[Path] = ()
    ) -> None:
        self.folder = folder.absolute()
        self.keep = keep
        self.before_save: list[Callable[[State], None]] = []
        self.after_save: list[Callable[[Path], None]] = []
        self._kept = list(earlier)
        self._is_due = create_interval_scheduler(interval)
        self._last_batch = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start from the checkpoint that is loaded; remove what killed saves left."""
        self._last_batch = state.timestamp.batch.value
        if dist.get_global_rank() == 0:
            for partial in self.folder.glob(f"ep*-ba*{PARTIAL}"):
                partial.unlink(missing_ok=True)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save in the middle of an epoch, when it is time."""
        if self._is_due(state, Event.BATCH_CHECKPOINT):
            self.save(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save at the end of an epoch, when it is time."""
        if self._is_due(state, Event.EPOCH_CHECKPOINT):
            self.save(state)

    def save(self, state: State) -> None:
        """Save now, on all ranks together; nothing happens where this step is saved already.

        Raises:
            UserError: the file cannot be written. The earlier checkpoints are as they were.
        """
        time = state.timestamp
        if time.batch.value == self._last_batch:
            return
        for check in self.before_save:
            check(state)
        torch.cuda.empty_cache()  # room for what both gather from all ranks
        content: dict[str, Any] = {
            "state": state.state_dict(),
            "rng": reproducibility.get_rng_state(),
            "versions": versions(),
        }
        name = CHECKPOINT_NAME.format(epoch=time.epoch.value, batch=time.batch.value)
        from_rank_zero(lambda: self._write(content, self.folder / name))
        self._last_batch = time.batch.value

    def _write(self, content: dict[str, Any], path: Path) -> None:
        """Write a checkpoint and remove the oldest."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(content, path)
        except OSError as error:
            raise UserError(self._explain(error, path)) from error
        self._kept = [*(old for old in self._kept if old != path), path]
        while len(self._kept) > self.keep > 0:
            oldest = self._kept.pop(0)
            manifest_of(oldest).unlink(missing_ok=True)
            oldest.unlink(missing_ok=True)
        for hook in self.after_save:
            hook(path)

    def _explain(self, error: OSError, path: Path) -> str:
        place = next(place for place in (self.folder, *self.folder.parents) if place.exists())
        free = readable(shutil.disk_usage(place).free)
        start = f"the last one, {self._kept[-1]}" if self._kept else "the start"
        return (
            f"checkpoint {path} cannot be written: {error.strerror or error} ({free} free in "
            f"{place}). Make room there, or make it writable, and give the command again: it goes "
            f"on from {start}"
        )
