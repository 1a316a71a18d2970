"""Copies the files of a run into its bucket during training.

Composer's uploader needs processes of its own, which outlive a killed run, and ends the run if the
bucket is unreachable for a minute. Here the checkpoint is on the local disk first. One thread
uploads the newest one, however long that takes, and no step waits for it.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer.utils import dist

from pospre.attempts import attempts
from pospre.collectives import on_every_rank
from pospre.errors import Unreachable, UserError
from pospre.object_store import Bucket, s3_patience, seconds_in
from pospre.run.checkpoints.files import MANIFEST, files_of, read_manifest
from pospre.run.checkpoints.folders import BEST, NOTE, named_best, remove_oldest
from pospre.run.folder import mirror_run
from pospre.run.lease import check_held

_TRIES = 3
_SILENCE = 20.0  # seconds without a byte after which a try has failed
_GRACE = 15.0
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


def stop_grace() -> float:
    """Return how many seconds the last upload of a stopped run may take: ``POSPRE_GRACE``.

    The launcher decides when SIGKILL follows SIGTERM.
    """
    return seconds_in("POSPRE_GRACE", _GRACE)


class _Upload(NamedTuple):
    """The files of a checkpoint that this rank uploads."""

    checkpoint: Path
    files: tuple[Path, ...]
    together: bool = False  # with the other ranks, which wait for it


class Uploads:
    """Uploads the newest checkpoint of a run and its small files, in a thread of its own.

    If the bucket is slower than the run saves, checkpoints in between are skipped. Every rank
    uploads what it has written; the first one adds the manifest when everything is in the bucket.
    ``keep`` checkpoints stay in the folder ``remote`` (-1: all), and the best one, named by
    ``best/figure.json`` beside the local ones. The oldest is deleted after a newer one is complete
    there.
    """

    def __init__(self, run_folder: Path, remote: str, *, keep: int = -1) -> None:
        self.run_folder = run_folder
        self.remote = remote
        self.keep = keep
        self._patience, self._grace = s3_patience(), stop_grace()
        # made once, before training: boto reads megabytes for it and holds Python's lock meanwhile
        self._bucket = Bucket(remote, patience=_TRIES, timeout=_SILENCE)
        self._changed = threading.Condition()
        self._waiting: _Upload | None = None
        self._begun: _Upload | None = None  # by the thread
        self._left_out: _Upload | None = None
        self._leads = dist.get_global_rank() == 0
        self._hurry, self._over = False, threading.Event()
        self._failure: UserError | None = None
        self._warned = False
        self._sent, self._most, self._last_progress = 0, 0, 0.0
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        missing = self.finish() if error is None else self.finish(at_most=self._grace)
        with self._changed:  # a thread that waits for an answer tries no more after it
            self._over.set()
            self._changed.notify_all()
        if missing is not None and error is None:
            raise missing
        if missing is not None:
            print(f"warning: {missing}", file=sys.stderr)

    def offer(self, checkpoint: Path) -> None:
        """Upload a checkpoint soon, instead of an older one that still waits."""
        self._begin(_Upload(checkpoint, tuple(files_of(checkpoint))))

    def offer_together(self, checkpoint: Path, files: Sequence[Path]) -> None:
        """Offer on all ranks, or on none while any rank still uploads an older checkpoint.

        So all ranks upload the same checkpoints, and none waits for a file that another skipped.
        """
        upload = _Upload(checkpoint, tuple(files), together=True)
        is_busy = any(on_every_rank(lambda: self._waiting is not None))
        self._left_out = upload if is_busy else None
        if not is_busy:
            self._begin(upload)

    def _begin(self, upload: _Upload) -> None:
        with self._changed:
            self._waiting = upload
            if not self._thread.is_alive():
                self._thread.start()
            self._changed.notify_all()

    def finish(self, at_most: float = float("inf")) -> UserError | None:
        """Wait until the last checkpoint is uploaded; return an error if it is not.

        It gives up when no byte was uploaded for ``POSPRE_S3_PATIENCE`` seconds, and after
        ``at_most`` seconds.
        """
        start = time.monotonic()
        if self._left_out is not None:
            with self._changed:  # other ranks may wait for this one's files of the one before it
                self._changed.wait_for(lambda: self._waiting in (None, self._begun))
            self._begin(self._left_out)
            self._left_out = None
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting is None, timeout=2.0)
            if self._waiting is not None:
                print(
                    f"waiting for {self._waiting.checkpoint} to be uploaded to {self.remote} "
                    f"(gives up after {min(self._patience, at_most):g} s without progress)",
                    flush=True,
                )
            while self._waiting is not None:
                end = max(start, self._last_progress) + self._patience
                left = min(end, start + at_most) - time.monotonic()
                if left <= 0:
                    return self._given_up(self._waiting)
                self._changed.wait(left)
            self._hurry = False
        return None

    def _given_up(self, upload: _Upload) -> UserError:
        """Return the message about a checkpoint that was not uploaded."""
        failure = self._failure or Unreachable("the server does not answer")
        remedy = f"It is complete at {upload.checkpoint}; run the command again to upload it"
        if upload.together and not _is_whole(upload.checkpoint):
            remedy = (
                f"This node's part of it is at {upload.checkpoint}; the same command resumes from "
                f"the newest one in {self.remote}"
            )
        return failure.restated(
            f"the last checkpoint is not in {self.remote}: {failure}. {remedy} "
            "(POSPRE_S3_PATIENCE sets how many seconds to try)"
        )

    def _work(self) -> None:
        while not self._over.is_set():
            self._upload_next()

    def _upload_next(self) -> None:
        """Wait for a checkpoint, and upload it or a newer one, however often it fails."""
        failed: _Upload | None = None
        for _ in attempts(lambda: math.inf, _FIRST_PAUSE, _LONGEST_PAUSE, self._rest):
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._over.is_set())
                upload = self._begun = failed or self._waiting
                self._changed.notify_all()
            if upload is None or self._over.is_set():
                return
            try:
                self._upload(upload)
                self._remove_oldest(upload.checkpoint, self._keep_best(upload.checkpoint))
                return self._done(upload)
            except FileNotFoundError:  # newer ones have pushed it out
                return self._forget(upload)
            except Exception as error:  # whatever it is: the run must not lose its uploads by it
                if self._over.is_set():
                    return
                self._warn(error)
                failed = upload if upload.together else None

    def _upload(self, upload: _Upload) -> None:
        """Upload the small files, then the checkpoint, and the manifest last."""
        if self._leads:
            check_held(self.remote)
        name = upload.checkpoint.name
        with contextlib.ExitStack() as stack:  # the names may go while this is under way
            opened = {path.name: stack.enter_context(path.open("rb")) for path in upload.files}
            manifest = (upload.checkpoint / MANIFEST).read_bytes() if self._leads else b""
            self._sent = 0
            if self._leads:
                mirror_run(self.run_folder, self._bucket)
            with self._bucket as bucket:
                if self._leads:
                    bucket.delete(f"{name}/{MANIFEST}")  # of an earlier one of this name
                for file_name, file in opened.items():
                    bucket.upload(f"{name}/{file_name}", file, self._progress)
                if self._leads:
                    self._wait_for_others(upload.checkpoint, manifest, bucket)
                    bucket.put(f"{name}/{MANIFEST}", manifest)

    def _wait_for_others(self, checkpoint: Path, manifest: bytes, bucket: Bucket) -> None:
        """Wait until the files of other ranks are in the bucket.

        ``FileNotFoundError`` if the checkpoint was deleted here: other ranks may have skipped it.
        """
        expected = {part.file: part.bytes for part in read_manifest(manifest, checkpoint.name)}
        missing = len(expected)
        while expected:
            there = bucket.list(checkpoint.name)  # it alone: a bucket may keep thousands
            left = sum(there.get(name) != size for name, size in expected.items())
            if left == 0:
                return
            if left < missing:
                missing, self._last_progress = left, time.monotonic()
            self._failure = Unreachable(f"{left} files of other ranks are not there yet")
            if not checkpoint.is_dir():
                raise FileNotFoundError(checkpoint)
            time.sleep(_FIRST_PAUSE)

    def _keep_best(self, newest: Path) -> str | None:
        """Upload the best checkpoint if it was skipped; return its name."""
        folder = newest.parent / BEST
        note = (folder / NOTE).read_bytes() if (folder / NOTE).exists() else None
        name = named_best(note)
        if not self._leads or note is None or name is None:
            return None
        best = folder / name
        with self._bucket as bucket, contextlib.suppress(FileNotFoundError):  # on other disks
            there = bucket.find(f"{name}/{MANIFEST}")
            if best.exists() and there != (best / MANIFEST).read_bytes():
                self._most = 0  # its first byte is progress
                self._upload(_Upload(best, tuple(files_of(best))))
            bucket.put(f"{BEST}/{NOTE}", note)
        return name

    def _remove_oldest(self, newest: Path, best: str | None) -> None:
        if self.keep < 0 or not self._leads:
            return
        try:
            with self._bucket as bucket:
                remove_oldest(bucket, self.keep, newest.name, best)
        except UserError as error:  # what is new is there all the same
            print(f"warning: old checkpoints stay in {self.remote}: {error}", file=sys.stderr)

    def _progress(self, count: int) -> None:
        self._sent += count
        if self._sent > self._most:  # what goes up again after a failure is no progress
            self._most, self._last_progress = self._sent, time.monotonic()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            print(
                f"warning: {error}; training continues; its checkpoints are in "
                f"{self.run_folder} and will be uploaded when the bucket answers again",
                file=sys.stderr,
            )
        self._failure = error if isinstance(error, UserError) else UserError(str(error))
        self._warned = True

    def _rest(self, pause: float) -> None:
        """Wait before the next try; only briefly if a caller waits for it."""
        with self._changed:
            hurried = self._hurry
            pause = min(pause, 2 * _FIRST_PAUSE) if hurried else pause
            self._changed.wait_for(lambda: self._hurry and not hurried, timeout=pause)

    def _done(self, upload: _Upload) -> None:
        if self._warned:
            name = upload.checkpoint.name
            print(f"{self.remote} answers again: {name} is there", file=sys.stderr)
        self._failure, self._warned = None, False
        self._forget(upload)

    def _forget(self, upload: _Upload) -> None:
        with self._changed:
            self._most = 0
            if self._waiting == upload:
                self._waiting = None
            self._changed.notify_all()


def _is_whole(checkpoint: Path) -> bool:
    """Return whether all files of a local checkpoint are on this node's disk."""
    has_manifest = (checkpoint / MANIFEST).exists()
    return has_manifest and all(path.exists() for path in files_of(checkpoint))


def lacks(remote: str, checkpoint: Path) -> bool:
    """Return whether a bucket lacks a local checkpoint, or a part of it."""
    with Bucket(remote) as bucket:
        there = bucket.list(checkpoint.name)
        if any(there.get(path.name) != path.stat().st_size for path in files_of(checkpoint)):
            return True
        noted = bucket.find(f"{checkpoint.name}/{MANIFEST}")
        return noted != (checkpoint / MANIFEST).read_bytes()
