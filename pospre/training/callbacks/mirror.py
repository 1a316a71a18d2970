"""Keeps the small files of a run beside its checkpoints in the bucket."""

import sys
from pathlib import Path

from composer.callbacks import CheckpointSaver
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.errors import UserError
from pospre.object_store import Bucket

_NAMES = ("recipe.yaml", "metrics.jsonl", "report.html")


def mirror_run(run_folder: Path, remote_folder: str) -> None:
    """Copy the recipe, the metrics, the report and the evaluations of a run into its bucket."""
    paths = [run_folder / name for name in _NAMES]
    paths += sorted(path for path in (run_folder / "evaluation").rglob("*") if path.is_file())
    with Bucket(remote_folder) as bucket:
        for path in paths:
            if path.exists():
                bucket.put(path.relative_to(run_folder).as_posix(), path.read_bytes())


def restore_metrics(run_folder: Path, remote_folder: str) -> None:
    """Fetch the metrics of a run that goes on where its local folder is missing."""
    target = run_folder / "metrics.jsonl"
    if target.exists():
        return
    with Bucket(remote_folder) as bucket:
        if target.name not in bucket.list():
            return
    with Bucket(f"{remote_folder.rstrip('/')}/{target.name}") as bucket:
        bucket.fetch(target)


class RunMirror(Callback):
    """Copies the run's small files whenever ``saver`` has saved a checkpoint."""

    def __init__(self, run_folder: Path, remote_folder: str, saver: CheckpointSaver) -> None:
        self.run_folder = run_folder
        self.remote_folder = remote_folder
        self.saver = saver

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Copy after a checkpoint in the middle of an epoch."""
        self._mirror(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Copy after a checkpoint at the end of an epoch."""
        self._mirror(state)

    def _mirror(self, state: State) -> None:
        saved = self.saver.last_checkpoint_batch == state.timestamp.batch
        if saved and dist.get_global_rank() == 0:
            try:
                mirror_run(self.run_folder, self.remote_folder)
            except UserError as error:  # small files are not worth a run
                print(f"warning: {error}; copied again at the next checkpoint", file=sys.stderr)
