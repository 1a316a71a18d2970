"""Carries what a run leaves in its folder into its bucket, beside the training.

Composer's uploader needs processes of its own, which outlive a killed run, and ends the run when
the bucket is away for a minute. Here the checkpoint lies on the local disk first; one thread
carries the newest one up, for as long as that takes, and no step waits for it.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pospre.errors import UserError
from pospre.object_store import Bucket, s3_patience
from pospre.training.checkpoints.file import manifest_of

_NAMES = ("recipe.yaml", "metrics.jsonl", "watch.jsonl", "report.html")
_FOLDERS = ("evaluation", "bad_steps")
_TRIES = 3
_SILENCE = 20.0  # seconds without a byte after which a try has failed
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Uploads:
    """Uploads the newest checkpoint of a run and its small files, in a thread of its own.

    Where the bucket is slower than the run saves, checkpoints between are left out.

    Args:
        run_folder: the run's, with its small files.
        remote: ``s3://`` folder of the run's checkpoints.
    """

    def __init__(self, run_folder: Path, remote: str) -> None:
        self.run_folder = run_folder
        self.remote = remote
        self._patience = s3_patience()
        # made once, before training: boto reads megabytes for it and holds Python's lock meanwhile
        self._bucket = Bucket(remote, patience=_TRIES, timeout=_SILENCE)
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._hurry = False
        self._failure = ""
        self._sent, self._most, self._last_progress = 0, 0, 0.0
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        missing = self.finish()
        if missing is not None and error is None:
            raise UserError(missing)
        if missing is not None:
            print(f"warning: {missing}", file=sys.stderr)

    def offer(self, checkpoint: Path) -> None:
        """Upload a checkpoint file as soon as may be, instead of an older one that still waits."""
        with self._changed:
            self._waiting = checkpoint
            if not self._thread.is_alive():
                self._thread.start()
            self._changed.notify_all()

    def finish(self) -> str | None:
        """Wait until the last checkpoint is up; return what to say where it is not.

        It is given up when nothing has gone up for ``POSPRE_S3_PATIENCE`` seconds.
        """
        start = time.monotonic()
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._waiting is None, timeout=2.0):
                print(
                    f"waiting for {self._waiting} to be uploaded to {self.remote} (given up after "
                    f"{self._patience:g} s without progress)",
                    flush=True,
                )
            while self._waiting is not None:
                left = max(start, self._last_progress) + self._patience - time.monotonic()
                if left <= 0:
                    return (
                        f"the last checkpoint is not in {self.remote}: "
                        f"{self._failure or 'the server does not answer'}. It is whole at "
                        f"{self._waiting}; give the command again to upload it "
                        "(POSPRE_S3_PATIENCE sets for how many seconds that is tried)"
                    )
                self._changed.wait(left)
            self._hurry = False
        return None

    def _work(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                checkpoint = self._waiting
            assert checkpoint is not None
            try:
                self._upload(checkpoint)
            except FileNotFoundError:  # newer ones have pushed it out
                pass
            except Exception as error:  # whatever it is: the run must not lose its uploads by it
                self._warn(error)
                self._rest(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            self._done(checkpoint)

    def _upload(self, checkpoint: Path) -> None:
        """Upload the small files, then the checkpoint, and last what says that it is whole."""
        with checkpoint.open("rb") as file:  # that name may go while this is under way
            manifest = manifest_of(checkpoint)
            noted = manifest.read_bytes() if manifest.exists() else None
            mirror_run(self.run_folder, self._bucket)
            self._sent = 0
            with self._bucket as bucket:
                bucket.delete(manifest.name)  # of an earlier file of this name
                bucket.upload(checkpoint.name, file, self._progress)
                if noted is not None:
                    bucket.put(manifest.name, noted)

    def _progress(self, count: int) -> None:
        self._sent += count
        if self._sent > self._most:  # what goes up again after a failure is no progress
            self._most, self._last_progress = self._sent, time.monotonic()

    def _warn(self, error: Exception) -> None:
        if not self._failure:
            print(
                f"warning: {error}; training goes on, its checkpoints are in "
                f"{self.run_folder} and are uploaded when the bucket answers again",
                file=sys.stderr,
            )
        self._failure = str(error)

    def _rest(self, pause: float) -> None:
        """Wait before the next try, not long when somebody waits for it."""
        with self._changed:
            hurried = self._hurry
            pause = min(pause, 2 * _FIRST_PAUSE) if hurried else pause
            self._changed.wait_for(lambda: self._hurry and not hurried, timeout=pause)

    def _done(self, checkpoint: Path) -> None:
        if self._failure:
            print(f"{self.remote} answers again: {checkpoint.name} is there", file=sys.stderr)
        with self._changed:
            self._failure, self._most = "", 0
            if self._waiting == checkpoint:
                self._waiting = None
            self._changed.notify_all()


def lacks(remote: str, checkpoint: Path) -> bool:
    """Tell whether a bucket has not, or not as a whole, what a local checkpoint file holds."""
    manifest = manifest_of(checkpoint)
    noted = manifest.read_bytes() if manifest.exists() else None
    with Bucket(remote) as bucket:
        there = bucket.list().get(checkpoint.name) == checkpoint.stat().st_size
        return not there or bucket.find(manifest.name) != noted


def mirror_run(run_folder: Path, remote: Bucket) -> None:
    """Copy a run's small files into its bucket: all but its checkpoints."""
    paths = [run_folder / name for name in _NAMES]
    for folder in _FOLDERS:
        paths += sorted(path for path in (run_folder / folder).rglob("*") if path.is_file())
    with remote as bucket:
        for path in paths:
            if path.exists():
                bucket.put(path.relative_to(run_folder).as_posix(), path.read_bytes())


def restore_metrics(run_folder: Path, remote: str) -> None:
    """Fetch the metrics of a run whose bucket is further than its local folder; warnings, too."""
    target = run_folder / "metrics.jsonl"
    with Bucket(remote) as bucket:
        names = bucket.list()
        if target.name not in names:
            return
        theirs = bucket.read(target.name)
        ours = target.read_bytes() if target.exists() else b""
        if _last_step(theirs) > _last_step(ours):
            target.write_bytes(theirs)
            if "watch.jsonl" in names:
                target.with_name("watch.jsonl").write_bytes(bucket.read("watch.jsonl"))


def _last_step(metrics: bytes) -> int:
    """Return the last step that a metrics file tells of, 0 without any."""
    for line in reversed(metrics.splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):  # a kill came in the middle of this line
            continue
    return 0
