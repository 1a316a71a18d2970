"""A heartbeat every second between rank 0 and the others during training.

Each rank has one connection to rank 0. If it ends without a farewell, the process was killed.
Silence means that the process is stopped, or that its machine is gone.
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from pospre.collectives import wait_until
from pospre.untrusted_json import parse_json

BEAT = 1.0  # seconds
_CONNECT = 10.0
_LONGEST = 2**20  # bytes of what rank 0 says at once
_KILLED = "ended without notice: its process was killed, or its machine went down"


class Gone(NamedTuple):
    """A rank whose process ended early."""

    words: str  # the reason
    code: int  # the exit code of the other ranks, which end because of it
    since: float  # when this was noticed, on the monotonic clock


class Heartbeat:
    """The thread that sends and listens, and calls ``each_beat`` once a second.

    ``gone`` are the ranks that are known to have ended early.
    """

    def __init__(self, rank: int, world_size: int, each_beat: Callable[[], None]) -> None:
        self.rank = rank
        self.gone: dict[int, Gone] = {}
        now = time.monotonic()
        self._heard = {other: now for other in range(world_size) if other != rank}
        self._each_beat = each_beat
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: list[Any] = []  # asyncio itself holds them weakly
        self._token = ""
        self._has_left = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def serve(self) -> tuple[int, str]:
        """Listen for the other ranks; return the port, and the token that they must send."""
        self._token = secrets.token_hex()
        port: int = self._do(self._serve())
        return port, self._token

    def call(self, address: str, port: int, token: str) -> None:
        """Connect to rank 0; ``OSError`` if it does not answer."""
        self._do(self._call(address, port, token))

    def leave(self, words: str = "", code: int = 0) -> None:
        """Sign off from the other ranks and stop; if early, with the reason and an exit code."""
        if self._has_left:
            return
        self._has_left = True
        with suppress(TimeoutError):
            self._do(self._leave(words, code), timeout=2 * BEAT)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def wait_for_first(self, at_most: float) -> None:
        """Wait until rank 0 has left, or is gone."""
        wait_until(lambda: not self.rank or 0 not in self._writers, at_most)

    def silent(self, seconds: float) -> dict[int, float]:
        """Return the ranks that have been silent for over ``seconds``, each with the duration."""
        now = time.monotonic()
        heard = dict(self._heard)
        # of the others rank 0 tells: while it is silent itself nothing is known of them
        until = {rank: heard.get(0, now) if self.rank and rank else now for rank in heard}
        quiet = {rank: until[rank] - last for rank, last in heard.items()}
        return {rank: length for rank, length in quiet.items() if length > seconds}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _do(self, work: Any, timeout: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    async def _serve(self) -> int:
        if socket.has_dualstack_ipv6():
            door = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            door = socket.create_server(("", 0))
        server = await asyncio.start_server(self._welcome, sock=door)
        self._tasks += [server, asyncio.create_task(self._beat())]
        return door.getsockname()[1]

    async def _call(self, address: str, port: int, token: str) -> None:
        connecting = asyncio.open_connection(address, port, limit=_LONGEST)
        reader, writer = await asyncio.wait_for(connecting, _CONNECT)
        writer.write(_line([self.rank, token]))
        self._writers[0] = writer
        self._tasks += [
            asyncio.create_task(work) for work in (self._listen(reader, 0), self._beat())
        ]

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # strangers may call here; Python 3.11 prints a cancelled call as an error
        with suppress(ValueError, OSError, asyncio.CancelledError):
            rank, token = parse_json(await reader.readline())
            if secrets.compare_digest(str(token), self._token) and rank in self._heard:
                self._writers[rank] = writer
                await self._listen(reader, rank)

    async def _listen(self, reader: asyncio.StreamReader, rank: int) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                self._take(rank, parse_json(line))
        if rank in self._writers:
            self._part(rank, _KILLED, 75)

    def _take(self, rank: int, said: Any) -> None:
        now = time.monotonic()
        self._heard[rank] = now
        for other, words, code in said.get("gone", []):
            if other != self.rank:
                self.gone.setdefault(other, Gone(words, code, now))
        if rank == 0:
            silent = dict(said.get("silent", []))
            self._heard = {r: now - silent.get(r, 0.0) for r in self._heard}
        if "farewell" in said:
            self._part(rank, *said["farewell"])

    def _part(self, rank: int, words: str, code: int) -> None:
        """Note that a rank has ended; a regular end does not concern the others."""
        self._writers.pop(rank, None)
        self._heard.pop(rank, None)
        if rank == 0:
            self._heard.clear()
        if code:
            self.gone.setdefault(rank, Gone(words, code, time.monotonic()))
            self._send()

    def _send(self) -> None:
        """Send a beat; rank 0 adds what it knows about the others."""
        said: dict[str, Any] = {}
        if self.rank == 0:
            gone = self.gone.items()
            said["gone"] = [[rank, what.words, what.code] for rank, what in gone]
            said["silent"] = list(self.silent(2 * BEAT).items())
        for writer in self._writers.values():
            writer.write(_line(said))

    async def _beat(self) -> None:
        while True:
            self._send()
            self._each_beat()
            start = time.monotonic()
            await asyncio.sleep(BEAT)
            lapse = time.monotonic() - start - BEAT
            if lapse > BEAT:  # this process was stopped and could not hear others
                self._heard = {rank: last + lapse for rank, last in self._heard.items()}

    async def _leave(self, words: str, code: int) -> None:
        writers = list(self._writers.values())
        self._writers.clear()
        for writer in writers:
            writer.write(_line({"farewell": [words, code]}))
        for writer in writers:
            with suppress(OSError):
                await writer.drain()
                writer.close()
                await writer.wait_closed()


def _line(said: Any) -> bytes:
    return json.dumps(said).encode() + b"\n"
