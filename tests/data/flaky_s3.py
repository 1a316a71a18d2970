"""An S3 over HTTP that misbehaves on demand: a proxy before moto's server, which counts and spoils.

Faults are given per object and used up one by one, in order; then the proxy behaves. In a ``Storm``
any request may meet a fault, drawn from a seed, and in an outage every one does.
"""

import http.client
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from tests.data.storm import STATUSES, Storm


@dataclass
class Fault:
    """What to do to an answer.

    Attributes:
        status: answer this instead.
        cut_after: bytes of the body after which the connection ends.
        pause: seconds to wait before the body.
        flip: change a byte in the middle of the body.
        drip: seconds between pieces of 1000 bytes of the body.
    """

    status: int = 0
    cut_after: int | None = None
    pause: float = 0.0
    flip: bool = False
    drip: float = 0.0


class FlakyS3:
    """The proxy.

    Attributes:
        url: where it listens.
        upstream: moto's server behind it.
        gets: GET requests by name of the object.
        sent: bytes of bodies sent, by name of the object.
        refused_writes: how many writes of each object are answered with 503, the first ones.
        writes: PUT and POST requests, by method and path.
        mute: writes whose path holds this are taken and never answered.
        deletes: names of the objects that were deleted one by one, in order.
        forbids_deletes: objects whose path holds this are not deleted: 403.
        expired: an access key that is no longer valid.
        is_tagless: answers have no ``ETag`` and no checksum, as those of some old servers.
        storm: troubles of all requests, if there are any.
        under_way: requests that are being answered, by method and path.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream = f"http://127.0.0.1:{upstream_port}"
        self.gets: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.refused_writes = 0
        self.writes: Counter[str] = Counter()
        self.mute: str | None = None
        self.deletes: list[str] = []
        self.forbids_deletes: str | None = None
        self.expired: str | None = None
        self.is_tagless = False
        self.storm: Storm | None = None
        self.under_way: Counter[str] = Counter()
        self._faults: dict[str, list[Fault]] = {}
        self._always: dict[str, Fault] = {}
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"flaky": self, "upstream_port": upstream_port})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def spoil(self, name: str, *faults: Fault) -> None:
        """Spoil the next answers for an object."""
        self._faults[name] = list(faults)

    def spoil_always(self, name: str, fault: Fault) -> None:
        """Spoil every answer for an object."""
        self._always[name] = fault

    def heal(self) -> None:
        """Behave, and count from zero."""
        self.refused_writes = 0
        self.mute = self.forbids_deletes = self.expired = self.storm = None
        self.is_tagless = False
        self.deletes.clear()
        for book in (self._faults, self._always, self.gets, self.writes):
            book.clear()
        self.sent = Counter()  # answers that are still under way count in the old one

    def next_fault(self, name: str) -> Fault:
        """Count a request and return what to do to its answer."""
        with self._lock:
            self.gets[name] += 1
            faults = self._faults.get(name)
            return faults.pop(0) if faults else self._always.get(name, Fault())

    def refuses_write(self, place: str) -> bool:
        """Tell whether a write is to be answered with 503: of each object the first so many."""
        with self._lock:
            self.writes[place] += 1
            return self.writes[place] <= self.refused_writes

    @contextmanager
    def answering(self, place: str) -> Iterator[None]:
        """Count a request as under way."""
        with self._lock:
            self.under_way[place] += 1
        try:
            yield
        finally:
            with self._lock:
                self.under_way[place] -= 1
                self.under_way += Counter()  # drops the zeros

    def draw(self) -> str:
        """Return the trouble that a request meets, empty for none."""
        with self._lock:
            return self.storm.draw() if self.storm else ""

    def close(self) -> None:
        """Stop listening."""
        self.mute = None
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone: they were killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    flaky: FlakyS3
    upstream_port: int
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._do(self._get)

    def do_HEAD(self) -> None:
        self._do(self._head)

    def do_DELETE(self) -> None:
        self._do(self._delete)

    def do_PUT(self) -> None:
        self._do(self._put)

    do_POST = do_PUT

    def _do(self, answer: Callable[[], None]) -> None:
        """Answer a request, or do to it what the storm has drawn."""
        trouble, storm = self.flaky.draw(), self.flaky.storm
        if self.flaky.expired and f"={self.flaky.expired}/" in self.headers.get(
            "Authorization", ""
        ):
            self._read_body()
            self._answer(403, [], b"<Error><Code>ExpiredToken</Code></Error>")
            return
        try:
            if trouble == "silence" and storm:
                self._read_body()
                time.sleep(storm.silence)
            else:
                with self.flaky.answering(f"{self.command} {self.path}"):
                    if trouble == "delay" and storm:
                        time.sleep(storm.late())
                    self._answer_or_spoil(trouble, answer)
        except ConnectionError:  # the client has gone: S3 does not keep half a write
            self.close_connection = True
            return
        if trouble in ("reset", "lost answer", "silence"):
            self._reset()

    def _answer_or_spoil(self, trouble: str, answer: Callable[[], None]) -> None:
        if trouble in ("", "delay"):
            answer()
        elif trouble in STATUSES:
            self._read_body()
            self._answer(int(trouble), [], b"<Error><Code>Trouble</Code></Error>")
        elif trouble == "lost answer":
            self._ask_upstream(self._read_body())
        elif trouble == "truncation" and self.command == "GET":
            status, headers, body = self._ask_upstream()
            self._answer(status, headers, body, Fault(cut_after=len(body) // 2))
        elif trouble == "truncation":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self._reset()

    def _reset(self) -> None:
        """End the connection as a machine does that has crashed."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _get(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        fault = self.flaky.next_fault(name)
        if fault.status:
            self._answer(fault.status, [], b"<Error><Code>Fault</Code></Error>")
            return
        status, headers, body = self._ask_upstream()
        if fault.flip:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 255]) + body[middle + 1 :]
        self._answer(status, headers, body, fault, name)

    def _head(self) -> None:
        status, headers, _ = self._ask_upstream(keep_length=True)
        self.send_response(status)
        for key, value in headers:
            self.send_header(key, value)
        self.end_headers()

    def _delete(self) -> None:
        forbidden = self.flaky.forbids_deletes
        if forbidden is not None and forbidden in self.path:
            self._answer(403, [], b"<Error><Code>AccessDenied</Code></Error>")
            return
        self.flaky.deletes.append(self.path.partition("?")[0].rpartition("/")[2])
        self._answer(*self._ask_upstream())

    def _put(self) -> None:
        sent = self._read_body()
        refused = self.flaky.refuses_write(f"{self.command} {self.path}")
        while self.flaky.mute is not None and self.flaky.mute in self.path:
            time.sleep(0.05)
        if refused:
            self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
        else:
            self._answer(*self._ask_upstream(sent))

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if len(body) < length:
                raise ConnectionResetError
            return body
        parts = []
        while size := int(self.rfile.readline().split(b";")[0] or b"-1", 16):
            parts.append(self.rfile.read(size))
            if size < 0 or not self.rfile.readline():
                raise ConnectionResetError
        self.rfile.readline()
        return b"".join(parts)

    def _ask_upstream(
        self, sent: bytes | None = None, *, keep_length: bool = False
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream_port, timeout=20)
        skipped = {"transfer-encoding", "expect", "content-length"}
        headers = {key: text for key, text in self.headers.items() if key.lower() not in skipped}
        upstream.request(self.command, self.path, sent, headers)
        answer = upstream.getresponse()
        body = answer.read()
        upstream.close()
        skipped = {"transfer-encoding", "connection", "server", "date"}
        if not keep_length:
            skipped.add("content-length")
        if self.flaky.is_tagless:
            skipped |= {"etag", "x-amz-checksum-crc32", "x-amz-checksum-type"}
        kept = [pair for pair in answer.getheaders() if pair[0].lower() not in skipped]
        return answer.status, kept, body

    def _answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        fault: Fault | None = None,
        name: str = "",
    ) -> None:
        fault, sent = fault or Fault(), self.flaky.sent
        self.send_response(status)
        for key, value in headers:
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        time.sleep(fault.pause)
        size = len(body) if fault.cut_after is None else min(fault.cut_after, len(body))
        step = 1000 if fault.drip else max(size, 1)
        try:
            for start in range(0, size, step):
                self.wfile.write(body[start : min(start + step, size)])
                sent[name] += min(step, size - start)
                time.sleep(fault.drip)
            if size < len(body):
                self.close_connection = True
                self.connection.shutdown(2)
        except OSError:  # the client has gone
            self.close_connection = True


_SERVERS: set[ThreadedMotoServer] = set()


@contextmanager
def moto_server() -> Iterator[int]:
    """Run moto's server; give its port.

    All of a process hold the same buckets, so the last one that ends empties them.
    """
    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    _SERVERS.add(moto)
    port = moto.get_host_and_port()[1]
    try:
        yield port
    finally:
        _SERVERS.discard(moto)
        if not _SERVERS:
            urlopen(Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")).close()
        moto.stop()


@contextmanager
def flaky_s3() -> Iterator[FlakyS3]:
    """Run moto's server and the proxy before it."""
    with moto_server() as port, closing(FlakyS3(port)) as flaky:
        yield flaky


def access(endpoint: str) -> dict[str, str]:
    """Return the variables of the environment that lead to the S3 at ``endpoint``."""
    return {
        "S3_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def use_bucket(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, patience: float | None = None
) -> None:
    """Let a test, and what it starts, use the S3 at ``endpoint``."""
    for name, value in access(endpoint).items():
        monkeypatch.setenv(name, value)
    if patience is not None:
        monkeypatch.setenv("POSPRE_S3_PATIENCE", f"{patience:g}")


def keys(client: Any, prefix: str = "") -> list[str]:
    """Return the names below a prefix of what the bucket ``bucket`` holds, sorted."""
    found = client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return sorted(item["Key"].removeprefix(prefix) for item in found)
