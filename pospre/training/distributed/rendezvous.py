"""How the ranks of a run find one another, and that all are about to train the same thing.

torch's own rendezvous waits for minutes and ends in its internal words. Here each rank looks for
the store of rank 0 (torch's, on ``MASTER_PORT``) and leaves a note there of what it is about to do;
rank 0 reads the notes and tells all ranks what is wrong.
"""

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import PrefixStore, Store, TCPStore

from pospre.errors import Unreachable, UserError
from pospre.recipe.recipe import Recipe
from pospre.training.distributed.agreement import (
    NODE_KEYS,
    Note,
    facts_of,
    name_difference,
    name_ranks,
)
from pospre.training.distributed.place import Place
from pospre.training.distributed.ranks import wait_until

_LONGER = "trainer.rendezvous_timeout waits longer"
_PAUSE = 0.1  # seconds between two looks
_AGAIN = 1.0  # seconds until the store of another run is looked at again
_HEARD = 5.0  # seconds for the other ranks to hear why rank 0 ends


@dataclass(frozen=True)
class Meeting:
    """What there is when all ranks have come.

    Attributes:
        hosts: the host of each rank.
        store: what all ranks share; torch's blocking one.
        server: on rank 0 what keeps it, for as long as this object lives.
    """

    hosts: list[str]
    store: Store
    server: Store | None


def meet(place: Place, recipe: Recipe, device: str) -> Meeting:
    """Wait until all ranks have come, and see that they are about to do the same.

    Args:
        place: of this process.
        recipe: as this process has read it.
        device: its kind: ``cpu`` or ``gpu``.

    Raises:
        Unreachable: on all ranks that have come: one of them is missing after
            ``trainer.rendezvous_timeout``.
        UserError: on all of them: one came twice, or has another recipe or version.
    """
    limit = recipe.trainer.rendezvous_timeout
    end = time.monotonic() + limit
    serves = place.rank == 0 and not place.is_served
    server = _serve(place) if serves else None
    note = Note(socket.gethostname(), os.getpid(), facts_of(recipe, place.world_size, device))
    while True:
        own_address = _reach(place, limit, end)
        if place.world_size > place.local_world_size:
            _use_interface(own_address)
        try:
            store, verdict = _join(place, note, limit, end)
            break
        except _OfAnother:
            if place.rank == 0 or time.monotonic() + _AGAIN > end:
                raise
            time.sleep(_AGAIN)
    if verdict["error"]:
        raise (Unreachable if verdict["is_short"] else UserError)(verdict["error"])
    return Meeting([host for host, _ in verdict["ranks"]], store, server)


class _OfAnother(Unreachable):
    """Who answers is of another run: perhaps of this one's last start, of which rank 0 ends now."""


def _join(place: Place, note: Note, limit: float, end: float) -> tuple[Store, dict[str, Any]]:
    """Leave a note in the store of rank 0, and return the store and what rank 0 says of all."""
    try:
        store = _connect(place, limit)
        is_first = _leave(store, place, note) == 1
        if place.rank == 0 and is_first:
            store.set("verdict", json.dumps(_judge(store, place, limit, end)))
            store.add("said", 1)
        verdict = _hear(store, place, limit)
        if verdict["error"] and place.rank == 0:
            wait_until(lambda: store.add("heard", 0) >= store.add("came", 0), _HEARD)
    except RuntimeError as error:  # torch's errors of connections are all of this kind
        raise _OfAnother(
            f"{place.master} answered rank {place.rank} and is gone before all ranks had come: "
            "either rank 0 has ended (see its output), or that is not the port of this run"
        ) from error
    own = [note.host, note.start]
    if not verdict["error"] and own not in verdict["ranks"][place.rank : place.rank + 1]:
        raise _OfAnother(f"{place.master} is in use by another run; choose another MASTER_PORT")
    return store, verdict


def _serve(place: Place) -> Store:
    """Start the store on rank 0; torch's own rendezvous, on this port too, shares it."""
    try:
        with socket.socket() as probe:  # torch would wait, and say it in its own words
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", place.port))
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen on port {place.port} of {socket.gethostname()}: "
            f"{error.strerror}. Choose another MASTER_PORT"
        ) from error
    return TCPStore(
        "127.0.0.1", place.port, is_master=True, wait_for_workers=False, multi_tenant=True
    )


def _connect(place: Place, limit: float) -> Store:
    """Return a connection to the store.

    torch waits for ever for one that takes the connection and says nothing: not so this thread.
    """
    connected: list[Store] = []

    def connect() -> None:
        wait = timedelta(seconds=limit + _HEARD)
        with suppress(RuntimeError):
            shared = TCPStore(place.address, place.port, timeout=wait, wait_for_workers=False)
            connected.append(shared)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        # an interpreter that ends in order would trip over the thread
        atexit.register(os._exit, Unreachable.code)
    if not connected:
        raise RuntimeError("no store answers there")
    # torchrun keeps its store when it starts the ranks again
    starts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return PrefixStore(f"pospre/{starts}", connected[0])


def _reach(place: Place, limit: float, end: float) -> str:
    """Wait until something answers where rank 0 should be; return the address that led there."""
    while True:
        try:
            with socket.create_connection((place.address, place.port), timeout=5) as found:
                return str(found.getsockname()[0])
        except OSError as error:
            failure = error.strerror or str(error)
        if time.monotonic() >= end:
            break
        time.sleep(_PAUSE)
    host = socket.gethostname()
    if place.rank == 0:
        raise UserError(
            f"MASTER_ADDR = {place.address} does not lead to this machine, {host}, on which rank 0 "
            f"runs: port {place.port} did not answer there within {limit:g} s ({failure}). Give "
            "all nodes the address of this one"
        )
    raise Unreachable(
        f"rank {place.rank} on {host} got no answer from rank 0 at {place.master} (MASTER_ADDR, "
        f"MASTER_PORT) within {limit:g} s: {failure}. See whether rank 0 was started, whether that "
        f"is the address of its machine, and whether the port is let through; {_LONGER}"
    )


def _use_interface(address: str) -> None:
    """Let gloo take the network that leads to rank 0, not the one that the host's name means.

    On many machines that is 127.0.0.1, which no other node reaches.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _leave(store: Store, place: Place, note: Note) -> int:
    """Leave this rank's note; return how many of this rank there are now."""
    number = store.add(f"tickets/{place.rank}", 1)
    store.set(f"note/{place.rank}/{number}", json.dumps(asdict(note)))
    store.add(f"notes/{place.rank}", 1)
    store.add("came", 1)
    return number


def _judge(store: Store, place: Place, limit: float, end: float) -> dict[str, Any]:
    """Wait for all ranks; return what is wrong, and host and process of each rank."""
    wait_until(lambda: _have_come(store, place.world_size), end - time.monotonic())
    notes = {rank: _notes(store, rank) for rank in range(place.world_size)}
    newest = {rank: found[-1] for rank, found in notes.items() if found}
    is_short = len(newest) < place.world_size
    again = [rank for rank, found in notes.items() if len(found) > 1]
    twice = [rank for rank in again if is_short or _is_of_two(notes[rank])]
    error = ""
    if twice:
        where = " and ".join(f"process {note.process} on {note.host}" for note in notes[twice[0]])
        error = f"rank {twice[0]} came twice: {where}. Give each node a NODE_RANK of its own"
    elif is_short:
        error = _name_missing(newest, place, limit)
    else:
        error = name_difference(newest)
        error += error and f" (only {', '.join(NODE_KEYS)} may differ)"
    ranks = [[note.host, note.start] for note in newest.values()]
    return {"error": error, "is_short": is_short and not twice, "ranks": ranks}


def _have_come(store: Store, world_size: int) -> bool:
    """Tell whether all ranks have come, or one of them from two hosts.

    From one host it may come again: it has ended and was started anew while others were waited for.
    """
    if store.add("came", 0) < world_size:
        return False
    notes = [_notes(store, rank) for rank in range(world_size)]
    return all(notes) or any(map(_is_of_two, notes))


def _is_of_two(notes: list[Note]) -> bool:
    return len({note.host for note in notes}) > 1


def _notes(store: Store, rank: int) -> list[Note]:
    count = store.add(f"notes/{rank}", 0)
    return [Note(**json.loads(store.get(f"note/{rank}/{n + 1}"))) for n in range(count)]


def _name_missing(first: Mapping[int, Note], place: Place, limit: float) -> str:
    hosts: dict[str, list[int]] = {}
    for rank, note in first.items():
        hosts.setdefault(note.host, []).append(rank)
    came = "; ".join(f"{name_ranks(ranks)} from {host}" for host, ranks in hosts.items())
    missing = name_ranks(rank for rank in range(place.world_size) if rank not in first)
    return (
        f"{len(first)} of {place.world_size} ranks came to rank 0 at {place.master} within "
        f"{limit:g} s: {came}. Missing: {missing}. See in its output why it did not come (was it "
        f"started, can it reach {place.master}?); {_LONGER}"
    )


def _hear(store: Store, place: Place, limit: float) -> dict[str, Any]:
    """Wait for what rank 0 says; it may have begun to wait just now."""
    if not wait_until(lambda: store.add("said", 0) > 0, limit + _HEARD):
        raise Unreachable(
            f"rank 0 at {place.master} says nothing; end it and start all ranks again"
        )
    verdict: dict[str, Any] = json.loads(store.get("verdict"))
    store.add("heard", 1)
    return verdict
