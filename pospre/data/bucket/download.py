"""Download of an object from a bucket, with retries and a time limit; of a shard into the cache.

boto3's transfer manager, which fetches checkpoints, is not used for shards. With a silent server
its threads ended a process 98 s after Ctrl-C; these end it after 1 s. It restarts interrupted parts
(25 MB for an object of 20 MB cut at 5 MB). It fails after five attempts even if an outage is short.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    FlexibleChecksumError,
    ReadTimeoutError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from pospre.attempts import attempts
from pospre.bucket_errors import code_of, explain, is_credential_fault, may_pass, status_of
from pospre.data.bucket.cache import ShardCache
from pospre.data.bucket.checks import unpack
from pospre.data.stores.mds_index import ShardEntry
from pospre.errors import Unreachable, UserError
from pospre.object_store import Bucket

PATIENCE_HINT = "POSPRE_S3_PATIENCE sets the maximal seconds for a shard"

# small: a download checks between blocks whether it should stop; with less, the threads' changes of
# Python's lock take as long as the download
_BLOCK = 128 << 10
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_REPLACED = ("PreconditionFailed", "412", "InvalidRange", "416")


class Stopped(Exception):
    """The download is no longer needed."""


class Refused(UserError):
    """The bucket does not have the object (``status`` 404), or denies access (403)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Download:
    """The download of one object.

    Args:
        most: bytes that it may have.
        tag: the ETag that it had when the data set was opened, if that must stay the same.

    Attributes:
        done: bytes written to the target.
        received: bytes received over the network, including interrupted attempts.
        cause: why the last attempt failed; empty if it did not.
    """

    def __init__(self, bucket: Bucket, name: str, most: int, tag: str = "") -> None:
        self.bucket = bucket
        self.key = bucket.path(name)
        self.address = f"s3://{bucket.name}/{self.key}"
        self.done = 0
        self.received = 0
        self.attempts = 0
        self.cause = ""
        self._most, self._tag = most, tag
        self._version: str | None = None
        self._heard = 0.0

    def state(self, size: int) -> str:
        """Return its progress in words."""
        if not self.attempts:
            return "another process downloads it, or keeps the shards that it should replace"
        last = f"; the last failure: {self.cause}" if self.cause else ""
        return f"{self.done} of {size} bytes received in {self.attempts} attempts{last}"

    def run(
        self,
        target: BinaryIO,
        *,
        patience: float,
        stop: threading.Event,
        silence: float = float("inf"),
    ) -> str:
        """Download into an open file, from its start.

        It takes at most ``patience`` seconds. An attempt fails after ``silence`` seconds without a
        byte. Return what is wrong with the content: it is too long, or does not have the bucket's
        checksum; empty if nothing.

        Raises:
            Unreachable: it took too long.
            UserError: an error that retrying cannot fix.
            Stopped: ``stop`` was set.
            OSError: the file cannot be written.
        """
        start = self._heard = time.monotonic()

        def rest(pause: float) -> None:
            if stop.wait(pause):
                raise Stopped

        def end() -> float:
            return min(start + patience, self._heard + silence)

        for self.attempts in attempts(end, _FIRST_PAUSE, _LONGEST_PAUSE, rest):
            try:
                return self._attempt(target, start + patience, stop)
            except FlexibleChecksumError:
                return "it does not have the checksum stored in the bucket"
            except (BotoCoreError, ClientError, HTTPError, ResponseParserError) as error:
                self.cause = self._passing_cause(error)
        raise Unreachable(
            f"{self.address} could not be downloaded: gave up after {self.attempts} attempts in "
            f"{time.monotonic() - start:.0f} s ({PATIENCE_HINT}); the last one: {self.cause}"
        )

    def _attempt(self, target: BinaryIO, deadline: float, stop: threading.Event) -> str:
        """Request the rest of the object and write it; return what is wrong with it."""
        rest = {}
        if self.done and self._version:
            rest = {"Range": f"bytes={self.done}-", "IfMatch": self._version}
        answer = self.bucket.client.get_object(Bucket=self.bucket.name, Key=self.key, **rest)
        self.bucket.has_answered = True
        self._version = answer.get("ETag")
        if self._tag and self._version not in (None, self._tag):
            raise UserError(
                f"{self.address} has been replaced in the bucket since this run opened the data "
                "set; start the run again to read what is there now."
            )
        if "ContentRange" not in answer:
            self.done = 0
        target.seek(self.done)
        body = answer["Body"]
        try:
            while block := body.read(_BLOCK):
                if stop.is_set():
                    raise Stopped
                target.write(block)
                self.done += len(block)
                self.received += len(block)
                self._heard = time.monotonic()
                if self._heard > deadline:
                    raise ReadTimeoutError(endpoint_url=self.address)
                if self.done > self._most:
                    return f"it has more than {self._most} bytes"
            return ""
        finally:
            body.close()

    def _passing_cause(self, error: Exception) -> str:
        """Return the problem of this attempt; raise if another attempt would fail too."""
        code, status = code_of(error), status_of(error)
        if may_pass(error):
            if status:
                return f"the server answered {status} {code}"
            if isinstance(error, ReadTimeoutError):
                return f"the server was silent, or too slow, after {self.done} bytes"
            if isinstance(error, ConnectionError):
                return explain(error, self.bucket.uri)
            return f"the connection was cut after {self.done} bytes ({type(error).__name__})"
        if code in _REPLACED:
            self.done = 0
            return "it was replaced while it was being downloaded"
        message = explain(error, self.address)
        if is_credential_fault(error) and self.bucket.has_answered:  # those in files get renewed
            self.bucket.connect()
            return message
        if status not in (403, 404) or code == "NoSuchBucket" or is_credential_fault(error):
            raise UserError(message) from error
        raise Refused(message, status) from error


class NotNow(Exception):
    """The shard must wait: another process has it, or there is no room before more urgent ones."""

    def __init__(self, *, no_room: bool) -> None:
        self.no_room = no_room


class ShardDownload:
    """The download of the shard ``shard_index`` by a thread, in at most ``patience`` seconds.

    It must have the ETag ``tag``, if given. For an ``urgent`` one a reader waits. Other shards are
    postponed (``NotNow``) if another process has them or there is no room. The event ``stop``
    cancels it.

    Attributes:
        received: bytes received over the network, including failed attempts.
        error: why it failed.
        is_over: whether it has finished or failed.
    """

    def __init__(
        self,
        shard_index: int,
        entry: ShardEntry,
        bucket: Bucket,
        patience: float,
        *,
        tag: str,
        urgent: bool,
        stop: threading.Event,
    ) -> None:
        self.shard_index = shard_index
        stored = entry.stored
        self._start = partial(Download, bucket, stored.name, stored.size, tag)
        self.download = self._start()
        self.received = 0
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.is_over = False
        self._entry, self._patience = entry, patience
        self._urgent, self._stop = urgent, stop

    def bring(self, cache: ShardCache, needs: Callable[[], dict[str, float]]) -> None:
        """Download the complete shard into the cache.

        Raises:
            NotNow: it is not urgent and not possible now.
            UserError: it cannot be downloaded, or not in time.
            Stopped: it is no longer needed.
        """
        entry = self._entry
        name, size = entry.raw.flat_name, max(entry.raw.size, entry.stored.size)
        patience = self._patience if self._urgent else 0
        with cache.downloading(name, patience, self._stop) as is_mine:
            if not is_mine and self._urgent and not self._stop.is_set():
                raise UserError(f"another process has been downloading it for {patience:.0f} s")
            if not is_mine:
                raise NotNow(no_room=False)
            if cache.holds(entry.raw):
                return
            for _ in range(2):
                with cache.incoming(name, size, needs, urgent=self._urgent) as path:
                    if path is None:
                        raise NotNow(no_room=True)
                    problem = self._fill(path)
                    if not problem:
                        cache.publish(name)
                        return
        raise UserError(
            f"{self.download.address} does not match the data set's description: {problem}; it was "
            "downloaded twice"
        )

    def _fill(self, path: Path) -> str:
        """Download into the shard's file; return what is wrong with the content."""
        self.download = download = self._start()
        with path.open("r+b") as file:
            try:
                problem = download.run(file, patience=self._patience, stop=self._stop)
            finally:
                self.received += download.received
            file.truncate(download.done)
        return problem or unpack(path, self._entry)
