"""What a rank says and tells the others when it ends, or ends because of them."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from pospre.errors import Lost, Stopped, UserError, run_command
from pospre.recipe.recipe import load_recipe
from pospre.run.peers import peers as joining
from pospre.run.peers.heartbeat import Gone
from pospre.run.peers.peers import Peers
from pospre.run.peers.ranks import Process
from pospre.run.peers.rendezvous import Meeting

KILLED, FAILED = Gone("was killed", 75, 0.0), Gone("failed: no such file", 2, 0.0)
GLOO = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
TOLD = RuntimeError("rank 0 failed: OSError: [Errno 28] No space left on device")


@pytest.fixture
def rank(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Peers]]:
    """Return ``rank(number)``: one of four ranks on two nodes, with the watch of it."""
    monkeypatch.setattr(joining, "_SILENT", 0.1)
    monkeypatch.setattr(joining, "BEAT", 0.1)
    monkeypatch.setattr(joining.atexit, "register", lambda *_: None)
    hosts = ["a", "a", "b", "b"]
    made: list[Peers] = []

    def one(number: int) -> Peers:
        process = Process(number, 4, number % 2, 2, "127.0.0.1", 1)
        meeting = Meeting(hosts, HashStore(), None)
        made.append(Peers(process, meeting, load_recipe(tiny)))
        return made[-1]

    before = signal.getsignal(signal.SIGTERM)
    yield one
    signal.signal(signal.SIGTERM, before)
    for peers in made:
        peers._heartbeat.leave()


def end(peers: Peers, error: BaseException, **gone: Gone) -> Lost | None:
    """Return what becomes of a rank that ``error`` ends, while others are gone (``of_1=…``)."""
    peers._heartbeat._heard.clear()
    peers._heartbeat.gone |= {int(name[3:]): what for name, what in gone.items()}
    try:
        peers.__exit__(type(error), error, None)
    except Lost as lost:
        return lost
    return None


def test_the_first_of_a_node_that_lives_names_the_lost_ones(
    rank: Callable[[int], Peers], tmp_path: Path
) -> None:
    lost = end(rank(1), GLOO, of_0=KILLED, of_2=KILLED, of_3=KILLED)
    assert lost is not None and lost.code == 75
    assert str(lost).startswith("rank 0 on a was killed; ranks 2 to 3 on b was killed. ")
    assert str(lost).endswith(
        f"resumes from the newest checkpoint in {tmp_path}/runs/tiny/checkpoints"
    )
    (tmp_path / "runs/tiny/checkpoints/ep1-ba4").mkdir(parents=True)
    (tmp_path / "runs/tiny/checkpoints/ep1-ba4/manifest.json").touch()
    lost = end(rank(2), GLOO, of_0=KILLED)
    assert str(lost).endswith("resumes from " + str(tmp_path / "runs/tiny/checkpoints/ep1-ba4"))
    lost = end(rank(3), GLOO, of_0=KILLED)
    assert str(lost) == "" and lost is not None and lost.code == 75


@pytest.mark.parametrize("error", [GLOO, TOLD])
def test_a_mistake_of_one_rank_ends_the_others_with_its_words(
    error: RuntimeError, rank: Callable[[int], Peers], capsys: pytest.CaptureFixture[str]
) -> None:
    lost = end(rank(2), error, of_0=FAILED, of_1=KILLED)
    assert lost is not None and "rank 0 on a failed: no such file" in str(lost)
    assert lost.code == 2 and "resumes" not in str(lost)
    assert str(end(rank(1), GLOO, of_0=FAILED)) == ""  # on its node it has spoken for itself
    assert str(end(rank(0), GLOO, of_1=FAILED)) == "rank 1 on a failed: no such file"

    def main() -> int:
        raise lost

    assert run_command(main) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), UserError("gloo"), Stopped(signal.SIGTERM, ""), KeyError("x")]
)
def test_what_is_no_other_ranks_doing_is_left_alone(
    error: Exception, rank: Callable[[int], Peers]
) -> None:
    assert end(rank(0), error, of_1=KILLED) is None


def test_a_failed_operation_while_all_live_is_left_alone(rank: Callable[[int], Peers]) -> None:
    assert end(rank(0), GLOO) is None


def test_a_signal_on_top_of_a_loss(rank: Callable[[int], Peers]) -> None:
    stopped = SystemExit(143)
    assert end(rank(0), stopped) is None
    assert str(end(rank(0), stopped, of_1=KILLED)).startswith("rank 1 on a was killed")
    stopped.__context__ = GLOO
    assert str(end(rank(0), stopped, of_1=KILLED)).startswith("rank 1 on a was killed")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("no data"), ("failed: no data", 2)),
        (Stopped(signal.SIGTERM, ""), ("", 0)),
        (SystemExit(143), ("was stopped by SIGTERM", 75)),
        (SystemExit(130), ("was stopped by Ctrl-C", 130)),
        (KeyboardInterrupt(), ("was stopped by Ctrl-C", 130)),
        (KeyError("x"), ("failed: KeyError: 'x' (see its own output)", 1)),
    ],
)
def test_the_farewell(error: BaseException, told: tuple[str, int]) -> None:
    assert joining._farewell(error) == told


def test_a_rank_that_waits_for_ever_ends(
    rank: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> None:
        raise InterruptedError(code)

    monkeypatch.setattr(joining.os, "_exit", leave)

    def hung(_: str) -> list[Any]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(joining, "checkpoints_in", hung)  # the disk has gone with the rank
    peers = rank(0)
    peers._look()
    peers._heartbeat._heard[1] -= 119
    peers._look()
    peers._heartbeat._heard[1] -= 2
    with pytest.raises(InterruptedError, match="75"):
        peers._look()
    assert "error: rank 1 on a has not answered for 121 s" in capfd.readouterr().err


def test_a_rank_without_its_launcher_stops(
    rank: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(joining.os, "kill", lambda *signal: told.append(signal))
    peers = rank(0)
    peers._look()
    monkeypatch.setattr(joining.os, "getppid", lambda: 1)
    peers._look()
    peers._look()
    assert told == [(os.getpid(), signal.SIGTERM)]
    assert capfd.readouterr().err.count("the launcher is gone") == 1
