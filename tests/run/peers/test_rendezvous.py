"""The ranks find one another, or one message says who is missing or does something else."""

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.run.peers import rendezvous
from pospre.run.peers.ranks import Note, Process, name_difference, name_ranks, read_process
from pospre.run.peers.rendezvous import Meeting, meet
from tests.processes import free_port

Outcome = Meeting | UserError
Ranks = list[Process]
Together = Callable[..., list[Outcome]]
FOUR = {
    "WORLD_SIZE": "4",
    "RANK": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def processes() -> list[Process]:
    port = free_port()
    return [Process(rank, 3, rank, 3, "127.0.0.1", port) for rank in range(3)]


@pytest.fixture
def together(tiny: Path) -> Together:
    """Return ``together(processes, …)``: what becomes of ranks that start at the same time."""

    def start(processes: Ranks, limit: float = 20.0, **others: list[str]) -> list[Outcome]:
        def one(number: int) -> Outcome:
            options = [f"trainer.rendezvous_timeout={limit}", *others.get(f"of_{number}", [])]
            try:
                return meet(processes[number], load_recipe(tiny, options), "cpu")
            except UserError as error:
                return error

        with ThreadPoolExecutor(len(processes)) as pool:
            return list(pool.map(one, range(len(processes))))

    return start


def words(outcomes: list[Outcome], code: int = 2) -> str:
    """Return the message that all ranks gave; its code is 69 if a rank may come later."""
    (message,) = {str(outcome) for outcome in outcomes}
    assert [getattr(outcome, "code", 0) for outcome in outcomes] == [code] * len(outcomes)
    return message


def test_all_come(processes: Ranks, together: Together) -> None:
    own_disk = ["data.path=/mnt/other", "data.num_workers=7", "trainer.run_folder=/tmp/x"]
    for outcome in together(processes, of_1=own_disk):
        assert isinstance(outcome, Meeting) and outcome.hosts == [socket.gethostname()] * 3


def test_a_missing_rank_is_named(processes: Ranks, together: Together) -> None:
    said = words(together([processes[0], processes[2]], limit=0.5), 69)
    assert "2 of 3 ranks came to rank 0" in said and "within 0.5 s" in said
    assert f"ranks 0, 2 from {socket.gethostname()}" in said and "Missing: rank 1." in said
    assert "trainer.rendezvous_timeout" in said


def test_an_unreachable_master_is_named(
    processes: Ranks, together: Together, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    said = words(together(processes[1:2], limit=0.5), 69)
    assert time.monotonic() - start < 5
    assert f"rank 1 on {socket.gethostname()} got no answer from rank 0 at" in said
    assert f"127.0.0.1:{processes[0].port} (MASTER_ADDR, MASTER_PORT) within 0.5 s" in said
    assert "Connection refused" in said
    nowhere = replace(processes[1], address="no.such.host.invalid")
    assert "no.such.host.invalid" in words(together([nowhere], limit=0.5), 69)
    elsewhere = replace(processes[0], address="192.0.2.1")
    said = words(together([elsewhere], limit=0.1))
    assert "MASTER_ADDR = 192.0.2.1 is not an address of this machine" in said
    assert capfd.readouterr() == ("", "")  # torch's warnings would be there


def test_another_recipe_is_named(processes: Ranks, together: Together) -> None:
    longer = ["trainer.max_duration=3ep"]
    said = words(together(processes, of_1=longer, of_2=longer))
    host = socket.gethostname()
    assert f"max_duration is 3ep on {host} (ranks 1 to 2), 4ep on {host} (rank 0)" in said
    assert "Give all nodes the same recipe" in said and "data.cache_dir" in said


def test_another_version_is_named(
    processes: Ranks, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rendezvous.facts_of

    def facts(recipe: Recipe, *rest: Any) -> dict[str, Any]:
        found = real(recipe, *rest)
        return found | {"torch's version": "2.6.0"} if recipe.data.num_workers == 7 else found

    monkeypatch.setattr(rendezvous, "facts_of", facts)
    said = words(together(processes, of_1=["data.num_workers=7"]))
    assert "torch's version is 2.6.0 on" in said and "(rank 1)" in said


@pytest.mark.parametrize("silent", [0, 1])
def test_a_git_that_does_not_answer_is_no_other_version(silent: int) -> None:
    facts = [{"torch's version": "2.7", "pospre's git revision": "abc"} for _ in range(3)]
    facts[silent]["pospre's git revision"] = None  # type: ignore[assignment]
    notes = {rank: Note(f"node{rank}", 1, told) for rank, told in enumerate(facts)}
    assert name_difference(notes) == ""
    facts[2] |= {"pospre's git revision": "abd"}
    assert ("git revision is abd on node2 (rank 2)" in name_difference(notes)) == (silent > 0)


def test_a_rank_that_comes_twice_is_named(
    processes: Ranks, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = words(together([processes[0], processes[1], processes[1]], limit=1))
    assert "rank 1 came twice: process" in said and "NODE_RANK" in said
    hosts = iter(range(9))
    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: f"node{next(hosts)}")
    start = time.monotonic()
    other = [replace(process, port=free_port()) for process in processes[:1]]
    other += [replace(processes[1], port=other[0].port)] * 2
    assert "rank 1 came twice: process" in words(together(other))
    assert time.monotonic() - start < 10  # no rank waits for the third


def test_a_rank_that_is_started_again_while_others_are_waited_for(
    processes: Ranks, together: Together
) -> None:
    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(together, processes[1:2], limit=5)
        first = pool.submit(together, processes[:2], limit=5)
        time.sleep(0.5)
        assert not first.done()  # the third one is missing
        met = together(processes[2:], limit=5) + first.result()
        (left,) = ended.result()
    if isinstance(left, Meeting):  # of the two that are the second, the later one is in
        met[2], left = left, met[2]
    assert all(isinstance(outcome, Meeting) for outcome in met), met
    assert "is in use by another run" in str(left)


def test_the_port_of_another_run(processes: Ranks, together: Together) -> None:
    first = together(processes)  # holds the store
    said = words(together(processes[:1]))
    assert f"rank 0 cannot listen on port {processes[0].port}" in said and "MASTER_PORT" in said
    said = words(together(processes[1:2], limit=0.5), 69)
    assert "is in use by another run; choose another MASTER_PORT" in said
    assert len(first) == 3


def test_who_comes_back_waits_until_the_last_start_has_ended(
    processes: Ranks, together: Together
) -> None:
    last = together(processes)
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(together, processes[1:])
        time.sleep(0.5)  # rank 0 still uploads
        assert not back.done()
        last.clear()
        met = together(processes[:1]) + back.result()
    assert all(isinstance(outcome, Meeting) for outcome in met), met


def test_a_connection_to_the_store_that_breaks_is_made_again(
    processes: Ranks, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, heard, broken = rendezvous._judge, rendezvous._hear, [0, 0, 2]

    def breaking(step: Callable[..., Any]) -> Callable[..., Any]:
        def broken_step(store: Any, process: Process, *rest: float) -> Any:
            if process.rank in broken:
                broken.remove(process.rank)
                raise RuntimeError("failed to recv, got 0 bytes")
            return step(store, process, *rest)

        return broken_step

    monkeypatch.setattr(rendezvous, "_judge", breaking(judge))
    monkeypatch.setattr(rendezvous, "_hear", breaking(heard))
    met = together(processes)
    assert all(isinstance(outcome, Meeting) for outcome in met), met
    assert not broken


def test_what_is_no_store_at_all(
    processes: Ranks, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **__: time.sleep(1))  # torch: for ever
    monkeypatch.setattr(rendezvous.atexit, "register", lambda *end: at_exit.append(end))
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the call and says nothing
        other = replace(processes[1], port=server.getsockname()[1])
        said = words(together([other], limit=0.5), 69)
    assert "the port is not that of this run" in said
    assert at_exit == [(os._exit, 69)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
        ({"RANK": "4"}, "RANK is '4' (WORLD_SIZE is 4); it must be a number from 0 to 3"),
        ({"RANK": None}, "RANK is not set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is '2'"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is '8'"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"WORLD_SIZE": None}, "RANK is '2' (WORLD_SIZE is not set)"),
    ],
)
def test_an_environment_that_cannot_be(changes: dict[str, str | None], said: str) -> None:
    environment = {name: value for name, value in (FOUR | changes).items() if value is not None}
    with pytest.raises(UserError) as mistake:
        read_process(environment)
    assert said in str(mistake.value) and "yamls/launch/" in str(mistake.value)


def test_the_environment_of_a_rank_and_of_a_lone_process() -> None:
    assert read_process(FOUR) == Process(2, 4, 0, 2, "node0", 29500)
    assert read_process({}) is None and read_process({"WORLD_SIZE": "1", "RANK": "0"}) is None


def test_ranks_as_a_person_writes_them() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([7, 4, 5, 6, 12]) == "ranks 4 to 7, 12"
