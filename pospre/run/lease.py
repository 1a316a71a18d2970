"""A lease on a folder in a bucket: only one run uses it, on whichever machine.

The object ``run.lease`` names the owner. Conditional puts write it, so that only one of two
simultaneous starts gets it. The owner writes it again every few seconds; a lease that no longer
changes belongs to a dead run. Machines never compare clocks: a later start watches by its own.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pospre.errors import UserError, printable
from pospre.object_store import Bucket, patiently
from pospre.scratch import boot_id
from pospre.untrusted_json import parse_object

LEASE = "run.lease"
EXPIRES = 45.0  # seconds without a change after which the owner is taken for dead
_RENEWED = 10.0  # seconds between two writes of the owner
_TIMEOUT = 5.0  # seconds after which a try of a write has failed
_LOOK = 2.0  # seconds between two looks at a lease of another run
_TRIES = 3
_lost: set[str] = set()  # folders that other runs have taken over from this process


@contextmanager
def lease(folder: str, patience: float = 0.0) -> Iterator[None]:
    """Hold an ``s3://`` folder while the body of ``with`` runs; ``UserError`` if another has it.

    Another machine can take it over if this one could not write for ``EXPIRES`` seconds. This
    process is then stopped as on SIGTERM. A bucket that does not answer is tried again for
    ``patience`` seconds.
    """
    held = _Lease(folder)
    patiently(held.take, patience)
    try:
        yield
    finally:
        held.give_back()


def check_held(folder: str) -> None:
    """Raise a ``UserError`` if another run has taken a folder over from this process."""
    if folder in _lost:
        raise UserError(f"{folder} was taken over by another run")


class _Held(NamedTuple):
    """A lease in the bucket: its owner, and the tag of its last write; empty if there is none."""

    owner: dict[str, Any]
    tag: str


class _Lease:
    """The lease of this run on the folder ``folder``."""

    def __init__(self, folder: str) -> None:
        self._bucket = Bucket(folder, patience=_TRIES, timeout=_TIMEOUT)
        self._owner: dict[str, Any] = {
            "run": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "machine": _machine(),
            "started": _started(os.getpid()),
            "writes": 0,
        }
        self._tag = ""
        self._answers = True
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def take(self) -> None:
        """Write the lease where there is none, or only that of a dead run; then keep it."""
        with self._bucket:
            old = self._wait_for_death(self._find())
            condition = {"IfNoneMatch": "*"} if old is None else {"IfMatch": old.tag}
            condition = {key: tag for key, tag in condition.items() if tag}
            other = None if self._write(**condition) else self._retake()
            if other is not None:
                raise self._refusal(other)
            if self._write(IfNoneMatch="*") or self._write(IfMatch='"0"'):
                print(
                    f"warning: the S3 endpoint of {self._bucket.uri} ignores conditional writes: "
                    "two runs that start there at the same moment are not kept apart",
                    file=sys.stderr,
                )
        _lost.discard(self._bucket.uri)
        self._thread.start()

    def give_back(self) -> None:
        """Remove the lease; where the bucket is away, it expires."""
        self._over.set()
        self._thread.join(_TIMEOUT)
        if self._thread.is_alive() or not self._answers:  # a stopped run does not wait
            return
        with suppress(UserError), self._bucket:
            if self._is_ours(self._find()):
                self._bucket.delete(LEASE)

    def _find(self) -> _Held | None:
        client = self._bucket.client
        try:
            answer = client.get_object(Bucket=self._bucket.name, Key=self._bucket.path(LEASE))
            written = answer["Body"].read()
        except client.exceptions.NoSuchKey:
            return None
        try:
            owner = parse_object(written)
        except ValueError:
            owner = {}
        return _Held(owner, answer.get("ETag", ""))

    def _write(self, **condition: str) -> bool:
        """Write the lease if the condition holds; tell whether it was written."""
        self._owner["writes"] += 1
        tag = self._bucket.put_if(LEASE, json.dumps(self._owner).encode(), **condition)
        self._tag = tag or self._tag
        return tag is not None

    def _wait_for_death(self, current: _Held | None) -> _Held | None:
        """Return the lease of a dead run, None where there is none (any more).

        Raises:
            UserError: it is renewed: that run is alive.
        """
        if current is None or self._is_ours(current) or _has_ended(current.owner):
            return current
        print(
            f"{self._bucket.uri} is, or was, in use by {_name(current.owner)}: waiting "
            f"{EXPIRES:g} s to see whether that run is alive",
            flush=True,
        )
        end = time.monotonic() + EXPIRES
        while time.monotonic() < end:
            time.sleep(_LOOK)
            now = self._find()
            if now is None:
                return None
            if now != current:
                raise self._refusal(now)
        return current

    def _refusal(self, current: _Held) -> UserError:
        return UserError(
            f"{self._bucket.uri} is in use by another run ({_name(current.owner)}). Wait until it "
            "has ended, stop it, or choose another trainer.save_folder"
        )

    def _is_ours(self, current: _Held | None) -> bool:
        return current is not None and current.owner.get("run") == self._owner["run"]

    def _keep(self) -> None:
        """Write the lease anew until it is over, or lost."""
        while not self._over.wait(_RENEWED):
            self._answers = False
            # an outage is no loss: until it is over no other run can write either
            with suppress(UserError), self._bucket:
                is_known = bool(self._tag)  # else a write would not ask whose the lease is
                other = None if is_known and self._write(IfMatch=self._tag) else self._retake()
                self._answers = True
                if other is not None:
                    _lost.add(self._bucket.uri)
                    print(
                        f"{self._bucket.uri} was taken over by {_name(other.owner)} while this "
                        "machine could not write there: stopping as on SIGTERM",
                        file=sys.stderr,
                        flush=True,
                    )
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    def _retake(self) -> _Held | None:
        """Return the lease of another run, None where it is still ours."""
        current = self._find()
        if current is None:  # it was deleted
            return None if self._write(IfNoneMatch="*") else self._find()
        if not self._is_ours(current):
            return current
        self._tag = current.tag  # of a write of ours, the answer to which was lost
        if not current.tag:
            self._write()
        return None


def _name(owner: dict[str, Any]) -> str:
    process, host = owner.get("process", "?"), owner.get("host", "an unknown host")
    return printable(f"process {process} on {host}")[:200]


def _has_ended(owner: dict[str, Any]) -> bool:
    """Return whether a process is known to have ended: it was of this machine and is not here."""
    process = owner.get("process")
    if owner.get("machine") != _machine() or not isinstance(process, int):
        return False
    return _started(process) != owner.get("started")


def _machine() -> str:
    """Return an id of this boot of this machine and of the process namespace."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex  # unlike any


def _started(process: int) -> int | None:
    """Return when a process was started, in ticks since the boot; None for one that has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
