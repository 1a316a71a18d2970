"""Joining the other ranks of a run and ending with them: no rank waits for a lost one.

If a rank dies, torch's collectives only report a closed connection. If a rank stalls, they report
nothing for ``trainer.dist_timeout``.
"""

import atexit
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from composer.devices import Device
from composer.utils import dist

from pospre.collectives import wait_until
from pospre.errors import Lost, Stopped, UserError
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.folders import checkpoints_in
from pospre.run.checkpoints.uploads import stop_grace
from pospre.run.peers.heartbeat import BEAT, Gone, Heartbeat
from pospre.run.peers.ranks import Process, name_ranks, read_process
from pospre.run.peers.rendezvous import Meeting, meet

_SILENT = 5.0  # seconds of silence from which on a failed operation is laid to a rank
_LEAVE = 30.0  # seconds in which a rank should have noticed itself that another has ended
_AGAIN = 75
_TOGETHER = re.compile(
    r"gloo|nccl|connection|socket|broken pipe|timed? ?out|^rank \d+ failed:", re.IGNORECASE
)


@contextmanager
def joined(recipe: Recipe, device: Device) -> Iterator[None]:
    """Join the other ranks of a run, if there are any, and leave them at the end.

    ``UserError`` if they do not find each other (see ``rendezvous.meet``); ``Lost`` if another rank
    ended early, or no longer answers.
    """
    process = read_process()
    if process is None or torch.distributed.is_initialized():  # a caller has joined them
        yield
        return
    meeting = meet(process, recipe, device.name)
    with Peers(process, meeting, recipe):
        dist.initialize_dist(device, recipe.trainer.dist_timeout)
        yield


class Peers:
    """The other ranks, watched while the body of ``with`` runs."""

    def __init__(self, process: Process, meeting: Meeting, recipe: Recipe) -> None:
        self._process = process
        self._meeting = meeting
        self._recipe = recipe
        self._launcher = os.getppid()
        self._grace = stop_grace()  # now, so that a mistake shows at the start
        self._heartbeat = Heartbeat(process.rank, process.world_size, self._look)

    def __enter__(self) -> "Peers":
        process, store = self._process, self._meeting.store
        if process.rank == 0:
            store.set("peers", json.dumps(self._heartbeat.serve()))
            return self
        port, token = json.loads(store.get("peers"))
        try:
            self._heartbeat.call(process.address, port, token)
        except (OSError, TimeoutError) as error:
            raise UserError(
                f"rank {process.rank} on {socket.gethostname()} reaches {process.master}, but not "
                f"port {port} there ({error or 'no answer'}): nodes must accept "
                "connections from each other on all ports"
            ) from error
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        gone = self._to_blame(error)
        if isinstance(error, Stopped):  # launchers kill soon after the first one has ended
            self._heartbeat.wait_for_first(self._grace + _LEAVE)
        self._heartbeat.leave(*(_farewell(error) if error and not gone else ()))
        if gone:
            lost = self._lost(gone)
            atexit.register(_end, lost.code)
            raise lost from None

    def _to_blame(self, error: BaseException | None) -> dict[int, Gone]:
        """Return the lost ranks that made this one fail; wait briefly for news of them."""
        if not _is_of_all_ranks(error):
            # SIGTERM, perhaps: a launcher ends the others when one is lost
            return dict(self._heartbeat.gone) if isinstance(error, SystemExit) else {}
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_until(lambda: bool(self._missing()), 2 * _SILENT)
        time.sleep(BEAT)  # for the others of its node
        return self._missing()

    def _missing(self) -> dict[int, Gone]:
        """Return the ranks that ended and those that have been silent."""
        silent = {
            rank: Gone(f"has not answered for {length:.0f} s", _AGAIN, 0.0)
            for rank, length in self._heartbeat.silent(_SILENT).items()
        }
        return silent | self._heartbeat.gone

    def _lost(self, gone: dict[int, Gone]) -> Lost:
        """Return the error that ends this rank; only the first live rank of a node explains it."""
        code = min(what.code for what in gone.values())
        first = self._process.rank - self._process.local_rank
        node = range(first, first + self._process.local_world_size)
        others_say_it = any(rank not in gone for rank in node if rank < self._process.rank)
        if others_say_it or (0 in gone and 0 in node and code != _AGAIN):  # it has said it itself
            return Lost("", code)
        kinds: dict[tuple[str, str], list[int]] = {}
        for rank, what in gone.items():
            kinds.setdefault((self._meeting.hosts[rank], what.words), []).append(rank)
        said = [f"{name_ranks(ranks)} on {host} {words}" for (host, words), ranks in kinds.items()]
        return Lost("; ".join(said) + (self._resume_hint() if code == _AGAIN else ""), code)

    def _resume_hint(self) -> str:
        saved = []
        with suppress(OSError):  # the disk may have gone with the rank
            saved = checkpoints_in(str(self._recipe.local_checkpoints()))
        newest = f"the newest checkpoint in {self._recipe.checkpoint_folder()}"
        where = saved[0].uri if saved else newest
        return f". The other ranks stop too; the same command resumes from {where}"

    def _look(self) -> None:
        """End this process if a rank is lost; runs every second, as the main thread may hang."""
        now = time.monotonic()
        late = {r: g for r, g in self._heartbeat.gone.items() if now - g.since > _LEAVE}
        silent = self._heartbeat.silent(self._recipe.trainer.peer_timeout)
        if late or silent:
            lost = self._lost(self._missing())
            _say(f"error: {lost}" if str(lost) else "")
            _end(lost.code)
        if os.getppid() != self._launcher:
            self._launcher = os.getppid()
            os.kill(os.getpid(), signal.SIGTERM)
            _say("the launcher is gone: stopping as on SIGTERM")


def _is_of_all_ranks(error: BaseException | None) -> bool:
    """Return whether a collective operation failed, even if a signal arrived as well."""
    while isinstance(error, RuntimeError | SystemExit | KeyboardInterrupt):
        if isinstance(error, RuntimeError) and _TOGETHER.search(str(error)):
            return True
        error = error.__context__
    return False


def _farewell(error: BaseException) -> tuple[str, int]:
    """Return the message to the other ranks about the end of this one, and their exit code."""
    if isinstance(error, Stopped):  # so do they
        return "", 0
    if isinstance(error, UserError):
        return f"failed: {error}", error.code
    if isinstance(error, SystemExit | KeyboardInterrupt):
        by_ctrl_c = isinstance(error, KeyboardInterrupt) or error.code == 128 + signal.SIGINT
        return "was stopped by " + ("Ctrl-C" if by_ctrl_c else "SIGTERM"), 130 if by_ctrl_c else 75
    return f"failed: {type(error).__name__}: {error} (see its own output)", 1


def _say(text: str) -> None:
    """Write a line to stderr, even within another line or without a reader."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode() if text else b"")


def _end(code: int) -> NoReturn:
    """End the process at once: the regular ends of torch and CUDA may wait for the lost rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
