"""Addresses of weights: a run or a file, and what its user says of the encoder in it."""

import re
from typing import Any, NamedTuple

import yaml

from pospre.errors import UserError
from pospre.nn.encoder_options import Positions
from pospre.nn.positions.file_tables import Grid

POSITIONS, GRID, HEADS = ",positions=", ",grid=", ",heads="
"""What may follow a file's name: its encoder's positions, grid of patches, and heads."""
DROP = "drop"
"""In place of a scheme: the positions are left out on purpose."""
_SAID = re.compile(r",(positions|grid|heads)=")


class Address(NamedTuple):
    """An address of weights; None: nothing is said."""

    uri: str
    positions: Positions | None = None
    grid: Grid | None = None
    heads: int | None = None


def split_address(address: str) -> Address:
    """Split ``FILE,positions=SCHEME,grid=7x28,heads=12`` into the file and what is said of it."""
    uri, *said = _SAID.split(address)
    reading: dict[str, Any] = {"positions": _scheme, "grid": read_grid, "heads": _heads}
    values = {}
    for key, text in zip(said[::2], said[1::2], strict=True):
        values[key] = reading[key](text)
        if values[key] is None:
            raise UserError(f"{address}: {_WORDS[key]}, not '{text}'.")
    return Address(uri, **values)


def bare_address(address: str) -> str:
    """Return an address without what is said of its encoder."""
    return _SAID.split(address)[0]


_WORDS = {
    "positions": "after positions= comes a scheme's name, or {name: {option: value}} as in "
    f"recipes, or {DROP} to leave the positions out",
    "grid": "after grid= come rows and columns of patches, such as 7x28",
    "heads": "after heads= comes the number of attention heads",
}


def _scheme(text: str) -> Positions | None:
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if isinstance(given, dict):
        whole = len(given) == 1 and all(isinstance(each, dict) for each in given.values())
        return given if whole and all(isinstance(name, str) for name in given) else None
    return given if isinstance(given, str) else None


def read_grid(text: str) -> Grid | None:
    """Return (rows, columns) of ``14x14``; None for anything else."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    return None if match is None else (int(match[1]), int(match[2]))


def _heads(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,5}", text) else None


def as_grid(grid: Grid) -> str:
    """Write a grid as messages do."""
    return f"{grid[0]}×{grid[1]}"
