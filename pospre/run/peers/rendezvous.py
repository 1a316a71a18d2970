"""How the ranks of a run find each other and agree that they train the same thing.

torch's own rendezvous waits for minutes and then fails with an internal message. Here each rank
looks for the store of rank 0 (torch's, on ``MASTER_PORT``) and leaves a note about what it is about
to do. Rank 0 reads the notes and tells all ranks what is wrong.
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

from pospre.attempts import attempts
from pospre.collectives import wait_until
from pospre.errors import Unreachable, UserError
from pospre.recipe.recipe import Recipe
from pospre.run.peers.ranks import NODE_KEYS, Note, Process, facts_of, name_difference, name_ranks

_LONGER = "a larger trainer.rendezvous_timeout waits longer"
_PAUSE = 0.1  # seconds between two looks
_AGAIN = 1.0  # seconds until the store of another run is looked at again
_HEARD = 5.0  # seconds for the other ranks to hear why rank 0 ends


@dataclass(frozen=True)
class Meeting:
    """The result of a rendezvous of all ranks."""

    hosts: list[str]  # the host of each rank
    store: Store  # shared by all ranks; torch's blocking one
    server: Store | None  # on rank 0, keeps the store alive as long as this object


def meet(process: Process, recipe: Recipe, device: str) -> Meeting:
    """Wait until all ranks have arrived, and check that they are about to do the same.

    All ranks that arrived raise ``Unreachable`` if one is missing after
    ``trainer.rendezvous_timeout``, and ``UserError`` if one arrived twice, or has another recipe or
    version.
    """
    limit = recipe.trainer.rendezvous_timeout
    end = time.monotonic() + limit
    serves = process.rank == 0 and not process.is_served
    server = _serve(process) if serves else None
    note = Note(socket.gethostname(), os.getpid(), facts_of(recipe, process.world_size, device))
    for _ in attempts(lambda: end, _AGAIN, _AGAIN):
        own_address = _reach(process, limit, end)
        if process.world_size > process.local_world_size:
            _use_interface(own_address)
        try:
            store, verdict = _join(process, note, limit, end)
            break
        except _OfAnother as error:
            failure = error
            if process.rank == 0 and not (serves and isinstance(error, _Broken)):
                raise  # it knows that its port is its own
    else:
        raise failure
    if verdict["error"]:
        raise (Unreachable if verdict["is_short"] else UserError)(verdict["error"])
    return Meeting([host for host, _ in verdict["ranks"]], store, server)


class _OfAnother(Unreachable):
    """The answer comes from another run, perhaps the last start of this one, which is ending."""


class _Broken(_OfAnother):
    """The connection to the store was closed."""


def _join(process: Process, note: Note, limit: float, end: float) -> tuple[Store, dict[str, Any]]:
    """Leave a note in the store of rank 0; return the store and rank 0's answer to all."""
    try:
        store = _connect(process, limit)
        _leave(store, process, note)
        if process.rank == 0 and _notes(store, 0)[0].start == note.start:
            store.set("verdict", json.dumps(_judge(store, process, limit, end)))
            store.add("said", 1)
        verdict = _hear(store, process, limit)
        if verdict["error"] and process.rank == 0:
            wait_until(lambda: store.add("heard", 0) >= store.add("came", 0), _HEARD)
    except RuntimeError as error:  # torch's errors of connections are all of this kind
        raise _Broken(
            f"{process.master} answered rank {process.rank}, but was gone before all ranks came: "
            "either rank 0 has ended (see its output), or the port is not that of this run"
        ) from error
    own = [note.host, note.start]
    if not verdict["error"] and own not in verdict["ranks"][process.rank : process.rank + 1]:
        raise _OfAnother(f"{process.master} is in use by another run; choose another MASTER_PORT")
    return store, verdict


def _serve(process: Process) -> Store:
    """Start the store on rank 0; torch's own rendezvous, on this port too, shares it."""
    try:
        with socket.socket() as probe:  # torch would wait, and say it in its own words
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", process.port))
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen on port {process.port} of {socket.gethostname()}: "
            f"{error.strerror}. Choose another MASTER_PORT"
        ) from error
    return TCPStore(
        "127.0.0.1", process.port, is_master=True, wait_for_workers=False, multi_tenant=True
    )


def _connect(process: Process, limit: float) -> Store:
    """Return a connection to the store.

    torch waits forever for a peer that accepts the connection and stays silent; we do not.
    """
    connected: list[Store] = []

    def connect() -> None:
        wait = timedelta(seconds=limit + _HEARD)
        with suppress(RuntimeError):
            shared = TCPStore(process.address, process.port, timeout=wait, wait_for_workers=False)
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


def _reach(process: Process, limit: float, end: float) -> str:
    """Wait until rank 0 answers; return the address that led there."""
    for _ in attempts(lambda: end, _PAUSE, _PAUSE):
        try:
            with socket.create_connection((process.address, process.port), timeout=5) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            failure = error.strerror or str(error)
    host = socket.gethostname()
    if process.rank == 0:
        raise UserError(
            f"MASTER_ADDR = {process.address} is not an address of this machine, {host}, where "
            f"rank 0 runs: port {process.port} did not answer within {limit:g} s ({failure}). "
            "Give all nodes the address of this machine"
        )
    raise Unreachable(
        f"rank {process.rank} on {host} got no answer from rank 0 at {process.master} "
        f"(MASTER_ADDR, MASTER_PORT) within {limit:g} s: {failure}. Check that rank 0 was "
        "started, that this is the address of its machine, and that the port is open; "
        f"{_LONGER}"
    )


def _use_interface(address: str) -> None:
    """Make gloo use the network that leads to rank 0 instead of that of the host name.

    On many machines the host's name means 127.0.0.1, which no other node reaches.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _leave(store: Store, process: Process, note: Note) -> None:
    """Leave this rank's note, after those that it may have left before."""
    number = store.add(f"tickets/{process.rank}", 1)
    store.set(f"note/{process.rank}/{number}", json.dumps(asdict(note)))
    store.add(f"notes/{process.rank}", 1)
    store.add("came", 1)


def _judge(store: Store, process: Process, limit: float, end: float) -> dict[str, Any]:
    """Wait for all ranks; return the problem, and host and process of each rank."""
    wait_until(lambda: _have_come(store, process.world_size), end - time.monotonic())
    notes = {rank: _notes(store, rank) for rank in range(process.world_size)}
    newest = {rank: own_notes[-1] for rank, own_notes in notes.items() if own_notes}
    is_short = len(newest) < process.world_size
    again = [rank for rank, own_notes in notes.items() if len(own_notes) > 1]
    twice = [rank for rank in again if is_short or _is_of_two(notes[rank])]
    error = ""
    if twice:
        where = " and ".join(f"process {note.process} on {note.host}" for note in notes[twice[0]])
        error = f"rank {twice[0]} came twice: {where}. Give each node its own NODE_RANK"
    elif is_short:
        error = _name_missing(newest, process, limit)
    else:
        error = name_difference(newest)
        error += error and f" (only {', '.join(NODE_KEYS)} may differ)"
    ranks = [[note.host, note.start] for note in newest.values()]
    return {"error": error, "is_short": is_short and not twice, "ranks": ranks}


def _have_come(store: Store, world_size: int) -> bool:
    """Return whether all ranks have arrived, or one of them from two hosts.

    A rank may arrive again from the same host: it was restarted while others were waiting.
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


def _name_missing(first: Mapping[int, Note], process: Process, limit: float) -> str:
    hosts: dict[str, list[int]] = {}
    for rank, note in first.items():
        hosts.setdefault(note.host, []).append(rank)
    came = "; ".join(f"{name_ranks(ranks)} from {host}" for host, ranks in hosts.items())
    missing = name_ranks(rank for rank in range(process.world_size) if rank not in first)
    return (
        f"{len(first)} of {process.world_size} ranks came to rank 0 at {process.master} within "
        f"{limit:g} s: {came}. Missing: {missing}. Check its output: was it "
        f"started, and can it reach {process.master}?; {_LONGER}"
    )


def _hear(store: Store, process: Process, limit: float) -> dict[str, Any]:
    """Wait for rank 0's answer; it may have started to wait only now."""
    if not wait_until(lambda: store.add("said", 0) > 0, limit + _HEARD):
        raise Unreachable(
            f"rank 0 at {process.master} does not answer; stop it and start all ranks again"
        )
    verdict: dict[str, Any] = json.loads(store.get("verdict"))
    store.add("heard", 1)
    return verdict
