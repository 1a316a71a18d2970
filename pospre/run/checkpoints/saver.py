"""Saves checkpoints on the local disk while training continues.

Composer's own saver leaves a partial file under its final name if the disk is full. Its uploader
ends the run if the bucket fails, and each step waits for both. Here a step waits only for a copy of
the state in memory, which a thread writes completely or not at all. Shards of several ranks become
a checkpoint between two steps, when all ranks have written theirs. ``after_save`` starts the upload
(``uploads.py``).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist, reproducibility

from pospre.collectives import Greatest, from_rank_zero, on_every_rank, wait_for_all
from pospre.errors import UserError
from pospre.run.checkpoints.files import STATE, versions, why_not_written
from pospre.run.checkpoints.folders import CHECKPOINT_NAME, incomplete, remove
from pospre.run.checkpoints.intervals import AutoInterval
from pospre.run.checkpoints.rank_files import Part, Staging, Written, sharded_state

_WRITTEN, _WRITING, _FAILED = range(3)


class CheckpointSaver(Callback):
    """Saves every ``interval`` and at the end; keeps the last ``keep`` checkpoints.

    It writes one save at a time. The next save, the end of training and callers of ``wait`` wait
    for it. A failed save ends the run, on all ranks after the next step.

    Args:
        folder: local folder of the checkpoints.
        interval: between two saves, such as ``1ep`` or ``100ba``, or an ``AutoInterval``.
        keep: checkpoints to keep; -1 keeps all. The oldest is deleted only after a newer one is
            complete.
        earlier: checkpoints of an earlier start, oldest first; they count for ``keep``.
        together: let every rank write the shards that FSDP gives it; otherwise the first rank
            writes everything.

    Before anything is written, every rank calls ``before_save(state)`` of each callback that has
    such a method; an exception stops the save.

    Attributes:
        after_save: called on rank 0 with the path of every new checkpoint, usually in the thread
            that writes.
        after_parts: called on every rank, between two steps, with the path of a new checkpoint
            that all wrote together, and the files of it that this rank has written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        interval: str | AutoInterval,
        keep: int,
        earlier: Sequence[Path] = (),
        together: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self.keep = keep
        self.together = together
        self.after_save: list[Callable[[Path], None]] = []
        self.after_parts: list[Callable[[Path, list[Path]], None]] = []
        self._kept = list(earlier)
        self._auto = interval if isinstance(interval, AutoInterval) else None
        self._is_due = (
            create_interval_scheduler(interval) if isinstance(interval, str) else interval.is_due
        )
        self._last_batch = 0
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Written | None] | None = None
        self._part: Part | None = None
        self._path = self.folder
        self._shared = Greatest()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Continue from the loaded checkpoint; remove incomplete ones that killed saves left."""
        self._last_batch = state.timestamp.batch.value
        if self._auto is not None:
            self._auto.fit_start(self._last_batch)
        remains = from_rank_zero(lambda: incomplete(self.folder))
        if dist.get_local_rank() == 0:
            for name in remains:
                remove(self.folder / name)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start to compare the ranks' progress with the pending save, during the step."""
        if self._writing is not None:
            self._shared.begin(self._progress())

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Raise the error of a failed save; save within an epoch when it is time."""
        if self._writing is not None and self._progress_of_all() != _WRITING:
            self.wait()
        if self._is_due(state, Event.BATCH_CHECKPOINT):
            self.save(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save at the end of an epoch, when it is time."""
        if self._is_due(state, Event.EPOCH_CHECKPOINT):
            self.save(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Complete the last checkpoint before training ends."""
        self.wait()

    def close(self, state: State, logger: Logger) -> None:
        """Finish the pending save, even if training ends with an error."""
        self._thread.shutdown()
        failure = None if self._writing is None else self._writing.exception()
        if failure is not None:
            print(f"warning: {failure}", file=sys.stderr)

    def save(self, state: State) -> None:
        """Save this step, on all ranks together; do nothing if it is saved already.

        ``UserError`` if the previous save cannot be written. Earlier checkpoints are unchanged.
        """
        time = state.timestamp
        if time.batch.value == self._last_batch:
            return
        for callback in state.callbacks:
            if check := getattr(callback, "before_save", None):
                check(state)  # waits for a GPU, which is no cost of the save
        if self._auto is not None:
            self._auto.begin()
        self.wait()
        torch.cuda.empty_cache()  # room for what both gather from all ranks
        with sharded_state(state) if self.together else nullcontext():
            content: dict[str, Any] = {
                "state": state.state_dict(),
                "rng": plain_random(reproducibility.get_rng_state()),
                "versions": versions(),
            }
        self._path = self.folder / CHECKPOINT_NAME.format(
            epoch=time.epoch.value, batch=time.batch.value
        )
        if self.together or dist.get_global_rank() == 0:
            self._part = Part(content, self._staging, together=self.together)
        self._writing = self._thread.submit(self._write, self._part, self._path)
        self._last_batch = time.batch.value
        if self._auto is not None:
            self._auto.end(self._last_batch)

    def wait(self) -> None:
        """Wait, on all ranks together, until the last save is complete on disk.

        ``UserError`` if it cannot be written.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        wait_for_all(writing)
        written, path, part = on_every_rank(writing.result), self._path, self._part
        if self.together:
            assert part is not None
            parts = [each for each in written if each is not None]
            from_rank_zero(lambda: self._finish_parts(part, path, parts))
            self._finish(path)
            rank = dist.get_global_rank()
            names = [member.file for member in parts[rank].members] + [STATE] * (rank == 0)
            for hook in self.after_parts:
                hook(path, [path / name for name in names])

    def _progress(self) -> int:
        assert self._writing is not None
        if not self._writing.done():
            return _WRITING
        return _FAILED if self._writing.exception() else _WRITTEN

    def _progress_of_all(self) -> int:
        """Return the progress of all ranks at the start of this step, or of one rank now."""
        progress = self._shared.end()
        if progress is not None:
            return progress
        return _WRITING if dist.get_world_size() > 1 else self._progress()

    def _write(self, part: Part | None, path: Path) -> Written | None:
        """Write what this rank holds; complete the checkpoint if the other ranks hold nothing."""
        if part is None:
            return None
        with self._explained(path):
            written = part.write(path)
        if self.together:
            return written
        self._finish_parts(part, path, [written])
        self._finish(path)
        return None

    def _finish_parts(self, part: Part, path: Path, parts: list[Written]) -> None:
        with self._explained(path):
            part.finish(path, parts)

    def _finish(self, path: Path) -> None:
        """Delete the oldest, once per node (each may have its own disk), and announce the save."""
        self._kept = [*(old for old in self._kept if old != path), path]
        while len(self._kept) > self.keep > 0:
            oldest = self._kept.pop(0)
            if dist.get_local_rank() == 0:
                remove(oldest)
        for hook in self.after_save if dist.get_global_rank() == 0 else ():
            hook(path)

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            start = f"the last one, {self._kept[-1]}" if self._kept else "the start"
            why = why_not_written(error, self.folder)
            raise UserError(
                f"checkpoint {path} cannot be written: {why}, and run the command again: it "
                f"resumes from {start}"
            ) from error


def plain_random(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the random states of all ranks with lists instead of numpy's arrays.

    A file that may name arrays may also name addresses in memory; numpy takes a list as well.
    """
    plain = []
    for state in ranks:
        name, keys, *rest = state["numpy"]
        plain.append({**state, "numpy": (name, keys.tolist(), *rest)})
    return plain
