"""A rank that ends is known to all at once, and how; a silent one by its silence."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from pospre.run.peers import heartbeat
from pospre.run.peers.heartbeat import Heartbeat
from tests.processes import until


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeat]]:
    """Give three ranks with ten beats a second."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    beats = [Heartbeat(rank, 3, lambda: None) for rank in range(3)]
    port, token = beats[0].serve()
    for beat in beats[1:]:
        beat.call("127.0.0.1", port, token)
    until(lambda: len(beats[0]._writers) == 2)
    yield beats
    for beat in beats:
        if beat._loop.is_running():
            beat.leave()


def test_no_rank_is_missed_while_all_live_and_after_an_orderly_end(ranks: list[Heartbeat]) -> None:
    time.sleep(0.5)
    ranks[1].leave()
    time.sleep(0.5)
    ranks[0].leave()
    time.sleep(0.5)
    assert all(not beat.gone and not beat.silent(5) for beat in ranks)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank(rank: int, ranks: list[Heartbeat]) -> None:
    for writer in list(ranks[rank]._writers.values()):
        ranks[rank]._loop.call_soon_threadsafe(writer.transport.abort)
    others = [beat for beat in ranks if beat.rank != rank]
    until(lambda: all(rank in beat.gone for beat in others))
    for beat in others:
        assert beat.gone[rank].code == 75 and "its process was killed" in beat.gone[rank].words


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_failed(rank: int, ranks: list[Heartbeat]) -> None:
    ranks[rank].leave("failed: no data", 2)
    others = [beat for beat in ranks if beat.rank != rank]
    until(lambda: all(rank in beat.gone for beat in others))
    assert all(beat.gone[rank][:2] == ("failed: no data", 2) for beat in others)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stopped_rank(rank: int, ranks: list[Heartbeat]) -> None:
    ranks[rank]._loop.call_soon_threadsafe(ranks[rank]._loop.stop)  # its connections stay
    others = [beat for beat in ranks if beat.rank != rank]
    until(lambda: all(list(beat.silent(0.6)) == [rank] for beat in others))
    assert all(not beat.gone for beat in others)


def test_a_stopped_rank_blames_no_other(
    ranks: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, slept = threading.Barrier(len(ranks) + 1), 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept)
    monkeypatch.setattr(heartbeat, "time", clock)
    woken = threading.Event()
    looks: set[int] = set()
    missed: list[int] = []

    def stop() -> None:
        asleep.wait()
        woken.wait()

    def look(beat: Heartbeat) -> None:
        missed.extend(beat.silent(30))
        looks.add(beat.rank)

    for beat in ranks:
        beat._loop.call_soon_threadsafe(stop)
    asleep.wait()
    slept = 60.0
    for beat in ranks:
        beat._each_beat = partial(look, beat)
    woken.set()
    until(lambda: len(looks) == len(ranks))
    assert not missed


def test_a_stranger_is_not_listened_to(ranks: list[Heartbeat]) -> None:
    port = ranks[0]._tasks[0].sockets[0].getsockname()[1]
    stranger = Heartbeat(1, 3, lambda: None)
    stranger.call("127.0.0.1", port, "guessed")
    stranger.leave("failed: not at all", 2)
    time.sleep(0.5)
    assert not ranks[0].gone


def test_stopping_while_others_are_connected_prints_no_error(
    ranks: list[Heartbeat], caplog: pytest.LogCaptureFixture
) -> None:
    ranks[0]._loop.call_soon_threadsafe(ranks[0]._loop.stop)
    until(ranks[0]._loop.is_closed)
    assert not caplog.records
