"""This process among the ranks of a run, and what must be equal on all of them."""

import hashlib
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

import pospre
from pospre.data.stores.description import Identity, difference
from pospre.errors import UserError
from pospre.recipe.provenance import values
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.files import revision

_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_LAUNCH = "start it with composer, or as in yamls/launch/"
# What may differ between the nodes of one run: where things are there, and how fast they go.
NODE_KEYS = (
    "data.path",
    "data.num_workers",
    "data.cache_dir",
    "data.cache_limit",
    "trainer.run_folder",
    "trainer.progress_bar",
)
_REVISION = "pospre's git revision"


@dataclass(frozen=True)
class Process:
    """The place of this process among the ranks, and the address of rank 0's store."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    is_served: bool = False  # by a launcher that keeps the store itself, as torchrun does

    @property
    def master(self) -> str:
        """``address:port`` of the store."""
        return f"{self.address}:{self.port}"


def read_process(environment: Mapping[str, str] = os.environ) -> Process | None:
    """Return the place of this process as the launcher sets it, None if it is the only process.

    ``UserError`` if the variables contradict each other, or some are missing.
    """
    if _number(environment, "WORLD_SIZE", low=1, default=1) == 1:
        _number(environment, "RANK", high=0, default=0)
        return None
    world_size = _number(environment, "WORLD_SIZE", low=1)
    local = _number(environment, "LOCAL_WORLD_SIZE", low=1, high=world_size)
    if not environment.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR is not set (WORLD_SIZE = {world_size}); {_LAUNCH}")
    return Process(
        rank=_number(environment, "RANK", high=world_size - 1),
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK", high=local - 1),
        local_world_size=local,
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", low=1, high=65535),
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def is_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether SLURM or torchrun has repeated the command by itself."""
    return any(environment.get(name, "0") not in ("", "0") for name in _RESTARTS)


def _number(
    environment: Mapping[str, str],
    name: str,
    *,
    low: int = 0,
    high: float = float("inf"),
    default: int | None = None,
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is not None and text.isdecimal() and low <= int(text) <= high:
        return int(text)
    given = "is not set" if text is None else f"is '{text}'"
    size = environment.get("WORLD_SIZE", "not set")
    wanted = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
    raise UserError(
        f"{name} {given} (WORLD_SIZE is {size}); it must be a number {wanted}: {_LAUNCH}"
    )


@dataclass(frozen=True)
class Note:
    """A rank's note about itself: where it runs and, by dotted key, what it is about to do.

    A restarted container has the same host and process, but another ``start``.
    """

    host: str
    process: int
    facts: dict[str, Any]
    start: str = field(default_factory=secrets.token_hex)


def facts_of(recipe: Recipe, world_size: int, device: str) -> dict[str, Any]:
    """Return by key what must be equal on all ranks, before their data are opened."""
    return {
        "pospre's version": pospre.__version__,
        _REVISION: revision(_sources()),
        "the SHA-256 of pospre's sources": hash_of_sources(),
        "torch's version": torch.__version__,
        "WORLD_SIZE": world_size,
        "the device": device,
        **_shared_keys(recipe),
    }


def check_data(recipe: Recipe, num_samples: int, identity: Identity) -> None:
    """Raise a ``UserError`` on all ranks if they have opened different data.

    The ``identity`` is that of the data; nodes may have them in several formats.
    """
    if dist.get_world_size() > 1:
        facts = {"the number of images in data.path": num_samples, **_shared_keys(recipe)}
        note = Note(socket.gethostname(), os.getpid(), facts)
        gathered = dist.all_gather_object((note, identity))
        notes = {rank: own for rank, (own, _) in enumerate(gathered)}
        error = name_difference(notes) or _name_other_data(notes, [data for _, data in gathered])
        if error:
            raise UserError(error)


def _name_other_data(notes: Mapping[int, Note], data: Sequence[Identity]) -> str:
    """Return which ranks have other data than rank 0, and how they differ; empty if none has."""
    others = [rank for rank, note in enumerate(data) if difference(data[0], note)]
    if not others:
        return ""
    what = difference(data[0], data[others[0]], "on rank 0", "there")
    return (
        f"data.path on {notes[others[0]].host} ({name_ranks(others)}) holds other data than on "
        f"{notes[0].host} (rank 0): {what}. Give all nodes the same data"
    )


def name_difference(notes: Mapping[int, Note]) -> str:
    """Return the first fact that differs from rank 0, and on which ranks; empty if all are equal.

    A revision that git did not report on a rank, as on a busy disk, is ignored: the sources have a
    hash.
    """
    first = notes[0]
    for key in dict.fromkeys(key for note in notes.values() for key in note.facts):
        value = first.facts.get(key)
        others = [rank for rank, note in notes.items() if note.facts.get(key) != value]
        if key == _REVISION:
            others = [rank for rank in others if value and notes[rank].facts.get(key)]
        if others:
            other = notes[others[0]]
            return (
                f"the nodes disagree: {key} is {other.facts.get(key)} on "
                f"{other.host} ({name_ranks(others)}), {value} on {first.host} (rank 0). Give all "
                "nodes the same recipe, key=value arguments, data and versions"
            )
    return ""


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as readable text: ``rank 3``, ``ranks 0 to 7, 12``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{'ranks' if sum(map(len, runs)) > 1 else 'rank'} {', '.join(texts)}"


def _shared_keys(recipe: Recipe) -> dict[str, Any]:
    return {key: value for key, value in values(recipe.dump()) if key not in NODE_KEYS}


def hash_of_sources() -> str:
    """Return the first digits of the SHA-256 of pospre's Python files."""
    total = hashlib.sha256()
    for path in sorted(_sources().rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def _sources() -> Path:
    return Path(pospre.__file__).parent
