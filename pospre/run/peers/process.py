"""The place of this process among the ranks, from the environment that its launcher sets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pospre.errors import UserError

_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_LAUNCH = "start it by composer, or as yamls/launch/ does"


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

    Raises:
        UserError: the variables contradict each other, or some are missing.
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
    """Tell whether SLURM or torchrun has repeated the command by itself."""
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
    raise UserError(f"{name} {given} (WORLD_SIZE is {size}): a number {wanted}; {_LAUNCH}")
