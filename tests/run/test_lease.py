"""A bucket folder belongs to one run: who gets it, who is refused, and what a dead one leaves."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.object_store import Bucket
from pospre.run import lease as leasing
from pospre.run.lease import LEASE, check_held, lease
from tests.data.flaky_s3 import FlakyS3
from tests.processes import until
from tests.training.tiny_runs import Run

FOLDER = "s3://bucket/runs/tiny"
KEY = {"Bucket": "bucket", "Key": f"runs/tiny/{LEASE}"}


@pytest.fixture
def bucket(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the bucket to leases that are renewed ten times a second."""
    monkeypatch.setattr(leasing, "EXPIRES", 5.0)
    monkeypatch.setattr(leasing, "_RENEWED", 0.1)
    monkeypatch.setattr(leasing, "_LOOK", 0.05)
    return bucket


def there(bucket: Any) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(bucket.get_object(**KEY)["Body"].read())
    except bucket.exceptions.NoSuchKey:
        return None
    return found


def left_behind(bucket: Any, **changes: Any) -> None:
    """Write the lease of a process of this machine that has ended, but for the changes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = leasing._started(process.pid)
        process.kill()
    owner = {"run": "a", "host": "elsewhere", "process": process.pid, "started": started}
    owner |= {"machine": leasing._machine()} | changes
    bucket.put_object(**KEY, Body=json.dumps(owner).encode())


def test_a_write_whose_answer_was_lost_is_no_other_run(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_if, lost = Bucket.put_if, ["the answer to the first write"]

    def put_again(self: Bucket, name: str, content: bytes, **condition: str) -> str | None:
        tag = put_if(self, name, content, **condition)
        return put_if(self, name, content, **condition) if lost and lost.pop() else tag

    monkeypatch.setattr(Bucket, "put_if", put_again)  # as boto does when it hears nothing
    with lease(FOLDER):
        assert not lost and there(bucket)["process"] == os.getpid()  # type: ignore[index]
    assert there(bucket) is None


def test_a_second_run_is_refused_as_long_as_the_first_one_lives(
    bucket: Any, tiny: Path, run: Run, tmp_path: Path
) -> None:
    options = (f"trainer.save_folder={FOLDER}", "trainer.max_duration=2ba", "schedule.warmup=1ba")
    with lease(FOLDER):
        code, said = run(tiny, *options)
        assert code == 2 and f"{FOLDER} is in use by another run" in said
        assert f"process {os.getpid()} on {socket.gethostname()}" in said
        assert not (tmp_path / "runs").exists()
        assert there(bucket) is not None
    assert there(bucket) is None
    assert run(tiny, *options)[0] == 0
    assert there(bucket) is None


def test_of_two_at_once_one_gets_it(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with lease(FOLDER):
        monkeypatch.setattr(leasing._Lease, "_wait_for_death", lambda self, found: None)
        with pytest.raises(UserError, match="in use by another run"), lease(FOLDER):
            pass


def test_a_killed_run_of_this_machine_is_replaced_at_once(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leasing, "EXPIRES", 1000.0)
    left_behind(bucket)
    with lease(FOLDER):
        assert there(bucket)["process"] == os.getpid()  # type: ignore[index]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "changes", [{"machine": "another"}, {"process": os.getpid(), "started": None}, {"started": "x"}]
)
def test_only_a_process_that_is_known_to_be_dead_is_replaced_at_once(
    changes: dict[str, Any], bucket: Any
) -> None:
    left_behind(bucket, **changes)
    owner = there(bucket)
    assert owner is not None
    assert leasing._has_ended(owner) == ("machine" not in changes)


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"\xff", b"[" * 100_000, b'{"process": NaN}', b'{"machine": 3, "process": "x"}'],
)
def test_a_lease_that_stays_as_it_is_expires(
    content: bytes, bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leasing, "EXPIRES", 0.3)
    bucket.put_object(**KEY, Body=content)
    start = time.monotonic()
    with lease(FOLDER):
        assert time.monotonic() - start >= 0.3
        assert there(bucket)["process"] == os.getpid()  # type: ignore[index]
    assert "waiting 0.3 s to see whether that run is alive" in capsys.readouterr().out


def test_a_lease_that_goes_while_it_is_watched_is_free(bucket: Any) -> None:
    left_behind(bucket, machine="another")
    found = leasing._Lease(FOLDER)
    watched = found._find()
    bucket.delete_object(**KEY)
    assert found._wait_for_death(watched) is None


def test_who_was_taken_for_dead_stops_when_it_comes_back(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(leasing.os, "kill", lambda *signal: told.append(signal))
    monkeypatch.setattr(leasing, "EXPIRES", 0.2)
    write, is_away = leasing._Lease._write, threading.Event()
    is_away.set()

    def renew(self: Any, **condition: str) -> bool:
        if is_away.is_set() and threading.current_thread().name == "lease":
            raise UserError("the network is away")
        return write(self, **condition)

    monkeypatch.setattr(leasing._Lease, "_write", renew)
    with lease(FOLDER):
        with lease(FOLDER):
            is_away.clear()
            until(lambda: bool(told))
            assert told == [(os.getpid(), signal.SIGTERM)]
            with pytest.raises(UserError, match="taken over by another run"):
                check_held(FOLDER)  # so that it uploads nothing any more
        assert "was taken over by process" in capsys.readouterr().err
    with lease(FOLDER):
        check_held(FOLDER)


def test_an_outage_and_a_lost_answer_are_sat_out(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(leasing.os, "kill", lambda *signal: told.append(signal))
    held = leasing._Lease(FOLDER)
    held.take()
    held._tag = '"of a write before the one that the server has taken"'
    writes = held._owner["writes"]
    until(lambda: held._owner["writes"] > writes + 2)
    bucket.delete_object(**KEY)  # by hand
    until(lambda: there(bucket) is not None)
    with monkeypatch.context() as patch:
        patch.setattr(held._bucket.client, "put_object", lambda **_: fail())
        time.sleep(0.3)
    writes = there(bucket)["writes"]  # type: ignore[index]
    until(lambda: there(bucket)["writes"] > writes)  # type: ignore[index]
    held.give_back()
    assert there(bucket) is None and told == []


def fail() -> None:
    raise OSError("the network is away")


class Careless(Bucket):
    """A bucket of a server that knows no conditions."""

    def __init__(self, uri: str, **options: Any) -> None:
        super().__init__(uri, **options)
        self.client.meta.events.register("before-sign.s3.PutObject", _without_conditions)


def _without_conditions(request: Any, **_: Any) -> None:
    for name in ("If-None-Match", "If-Match"):
        if name in request.headers:
            del request.headers[name]


def test_an_endpoint_without_conditions_is_warned_of(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leasing, "Bucket", Careless)
    with lease(FOLDER):
        assert "ignores conditional writes" in capsys.readouterr().err
        with pytest.raises(UserError, match="in use by another run"), lease(FOLDER):
            pass


def test_what_a_lease_says_cannot_obey_the_terminal(bucket: Any) -> None:
    left_behind(bucket, host="a\x1b[2J\nerror: b", machine="elsewhere")
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.1):
            left_behind(bucket, host="a\x1b[2J\nerror: b", machine="elsewhere", run=time.time())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(UserError) as caught, lease(FOLDER):
            pass
    finally:
        stop.set()
        thread.join()
    assert r"on a\x1b[2J\nerror: b)" in str(caught.value)


def test_a_server_without_tags_keeps_runs_apart(bucket: Any, proxy: FlakyS3) -> None:
    proxy.is_tagless = True
    left_behind(bucket)
    with lease(FOLDER):
        first = there(bucket)
        until(lambda: there(bucket)["writes"] > first["writes"] + 1)  # type: ignore[index]
        with pytest.raises(UserError, match="is in use by another run"), lease(FOLDER):
            pass
    assert there(bucket) is None
