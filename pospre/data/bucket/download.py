"""One object of a bucket, downloaded with patience: retried, taken up where it was cut, bounded.

boto3's transfer manager, which fetches checkpoints, is not used for shards: beside a silent server
a process ended 98 s after Ctrl-C with its threads and after 1 s with these, it begins a cut piece
anew (25 MB for an object of 20 that was cut at 5), and it gives up after five tries, however short
an outage is.
"""

import itertools
import random
import threading
import time
from typing import BinaryIO

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    FlexibleChecksumError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from urllib3.exceptions import HTTPError

from pospre.errors import Unreachable, UserError
from pospre.object_store import CREDENTIAL_FAULTS, Bucket, may_pass

PATIENCE_HINT = "POSPRE_S3_PATIENCE sets how many seconds a shard may take"

_BLOCK = 32 << 10  # small: between two blocks a download sees that it should stop
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_REPLACED = ("PreconditionFailed", "412", "InvalidRange", "416")


class Stopped(Exception):
    """The download was no longer wanted."""


class Refused(UserError):
    """The bucket does not hold the object (``status`` 404), or does not give it (403)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Download:
    """The download of one object.

    Attributes:
        address: of the object, for messages.
        done: bytes that lie in the target.
        received: bytes that came over the network, those of cut tries included.
        attempts: how often it was tried.
        cause: why the last try failed, or nothing.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.bucket = bucket
        self.key = bucket.path(name)
        self.address = f"s3://{bucket.name}/{self.key}"
        self.done = 0
        self.received = 0
        self.attempts = 0
        self.cause = ""
        self._version: str | None = None
        self._heard = 0.0

    def state(self, size: int) -> str:
        """Return how far it is."""
        if not self.attempts:
            return "another process downloads it, or keeps the shards that it should replace"
        last = f"; the last failure: {self.cause}" if self.cause else ""
        return f"{self.done} of {size} bytes came in {self.attempts} attempts{last}"

    def run(
        self,
        target: BinaryIO,
        *,
        patience: float,
        stop: threading.Event,
        silence: float = float("inf"),
    ) -> str:
        """Download into an open file, from its start.

        Args:
            target: the file.
            patience: seconds that it may take.
            stop: ends it.
            silence: seconds without a byte after which it is given up, too.

        Returns:
            what is wrong with the bytes that came, as far as the bucket knows, or nothing.

        Raises:
            Unreachable: it took too long.
            UserError: as soon as trying again cannot help.
            Stopped: ``stop`` was set.
            OSError: the file cannot be written.
        """
        start = self._heard = time.monotonic()
        for self.attempts in itertools.count(1):
            try:
                self._attempt(target, start + patience, stop)
                return ""
            except FlexibleChecksumError:
                return "it does not have the checksum that the bucket noted"
            except (BotoCoreError, ClientError, HTTPError) as error:
                self.cause = self._passing_cause(error)
            pause = min(_FIRST_PAUSE * 2.0 ** min(self.attempts - 1, 10), _LONGEST_PAUSE)
            pause *= random.uniform(0.5, 1)  # ranks that failed together should not come together
            if time.monotonic() + pause > min(start + patience, self._heard + silence):
                break
            if stop.wait(pause):
                raise Stopped
        raise Unreachable(
            f"{self.address} could not be downloaded: gave up after {self.attempts} attempts in "
            f"{time.monotonic() - start:.0f} s ({PATIENCE_HINT}); the last one: {self.cause}"
        )

    def _attempt(self, target: BinaryIO, deadline: float, stop: threading.Event) -> None:
        """Ask for the rest of the object and write it."""
        rest = {}
        if self.done and self._version:
            rest = {"Range": f"bytes={self.done}-", "IfMatch": self._version}
        answer = self.bucket.client.get_object(Bucket=self.bucket.name, Key=self.key, **rest)
        self._version = answer.get("ETag")
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
        finally:
            body.close()

    def _passing_cause(self, error: Exception) -> str:
        """Return what went wrong; raise where another try would end alike."""
        if isinstance(error, ConnectTimeoutError | EndpointConnectionError):
            return self.bucket.explain(error)
        if isinstance(error, ReadTimeoutError):
            return f"the server went silent, or was too slow, after {self.done} bytes"
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            raise UserError(self.bucket.explain(error)) from error
        if not isinstance(error, ClientError):
            return f"the connection was cut after {self.done} bytes ({type(error).__name__})"
        code = error.response["Error"]["Code"]
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if may_pass(error):
            return f"the server answered {status} {code}"
        if code in _REPLACED:
            self.done = 0
            return "it was replaced while it was being downloaded"
        message = self.bucket.explain(error, self.address)
        if code in CREDENTIAL_FAULTS:  # good ones have read the index: those in a file are replaced
            self.bucket.connect()
            return message
        if status not in (403, 404) or code == "NoSuchBucket":
            raise UserError(message) from error
        raise Refused(message, status) from error
