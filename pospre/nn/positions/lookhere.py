"""LookHere: each head looks in one direction, with a bias by distance (Fuller et al. 2024).

Head h only sees keys in its field of view (arXiv 2405.13985). In block l its bias from a query to
a key is

    −g · s_l · m_h · ‖place of the query − place of the key‖    in its field of view,
    −∞                                                         elsewhere

with the Euclidean distance in cells. Nothing is learned. A token always sees itself. Prefix tokens
see all tokens and are seen by all, with bias 0. Absolute positions can be inferred from the
borders.

A forgotten place sees all tokens and is seen by all, with bias 0. The scheme takes any grid and any
coordinates. On a larger grid, distances in cells grow, as the scheme intends. For views in boxes
(crops of a position field), cells are those of the encoder's grid.
"""

import math
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor

from pospre.errors import UserError, suggestion
from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme

Views = tuple[tuple[str, ...], ...]
FIELDS: dict[str, Views] = {
    "halves": (("up",), ("down",), ("left",), ("right",)),
    "corners": (("up", "left"), ("up", "right"), ("down", "left"), ("down", "right")),
    "triangles": (("upward",), ("downward",), ("leftward",), ("rightward",)),
    "eighths1": (("upward", "left"), ("downward", "left"), ("leftward", "up"), ("rightward", "up")),
    "eighths2": (
        ("upward", "right"),
        ("downward", "right"),
        ("leftward", "down"),
        ("rightward", "down"),
    ),
    "none": ((), (), (), ()),
}
"""Directions from the query to the key, for each run of four heads; see ``_directions``."""

_UNSEEN = torch.finfo(torch.bfloat16).min  # finite: a query may be left without any visible key
_SLACK = 1e-3  # of a cell: coordinates in boxes are rounded


@dataclass(eq=False, repr=False)
class LookHere(Scheme):
    """Fixed biases by direction and distance, different in each block."""

    fields: str | None = None
    """Names joined by ``-``: ``halves`` see 180°, ``corners`` and ``triangles`` 90°, ``eighths1``
    and ``eighths2`` 45°, ``none`` all. They share the heads in runs of four, from the first: 12
    heads of ``halves-none`` are 8 and 4. None: ``halves-none``, or ``halves`` with at most four
    heads.
    """
    slope: PositiveFloat = 1.0
    """g, for all heads and blocks."""
    layer_slopes: tuple[PositiveFloat, PositiveFloat] = (1.5, 0.5)
    """s of the first and the last block; linear in between."""

    shares_terms = False
    in_decoders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = "halves-none" if self.dims.num_heads > 4 else "halves"
        self.heads = head_views(self.fields or usual, self.dims.num_heads)
        self.slopes: Tensor
        self.register_buffer("slopes", torch.empty(self.dims.num_heads), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the slopes of the heads, including g."""
        self.slopes.copy_(self.slope * torch.tensor([slope for _, slope in self.heads]))

    def distances(self, places: Places, layer: int) -> Tensor:
        """Return the bias of block ``layer``: float32 (R, heads, T, T), R = 1 if rows are alike."""
        steps = places.steps(self.dims.grid, self.slopes.device)
        offset = steps[:, None] - steps[:, :, None]  # R, queries, keys, (down, across)
        directions = _directions(*offset.unbind(-1))
        everywhere = torch.ones_like(directions["up"])
        seen = [
            reduce(torch.logical_and, (directions[name] for name in view), everywhere)
            for view, _ in self.heads
        ]
        first, last = self.layer_slopes
        share = layer / max(self.dims.depth - 1, 1)
        scale = (first + (last - first) * share) * self.slopes[:, None, None]
        distance = offset.square().sum(-1).sqrt().unsqueeze(1)
        bias = torch.where(torch.stack(seen, 1), -scale * distance, _UNSEEN)
        return F.pad(bias, (self.dims.num_prefix, 0, self.dims.num_prefix, 0))


def _directions(down: Tensor, across: Tensor) -> dict[str, Tensor]:
    """Return masks of the keys in four half planes and four 90° quarters around each query.

    Borders belong to the fields on both sides; the query's own cell belongs to all fields.
    """
    aside, along = across.abs() - _SLACK, down.abs() - _SLACK
    return {
        "up": down <= _SLACK,
        "down": down >= -_SLACK,
        "left": across <= _SLACK,
        "right": across >= -_SLACK,
        "upward": -down >= aside,
        "downward": down >= aside,
        "leftward": -across >= along,
        "rightward": across >= along,
    }


def head_views(fields: str, heads: int) -> list[tuple[tuple[str, ...], float]]:
    """Return the field of view and the slope of every head.

    Slopes restart with each name: ½ for the first four heads, ¼ for the next, and so on. In
    ``none``, each quarter of the run has one of 4^−1, 4^−2, 4^−3 and 4^−4.
    """
    names, runs = fields.split("-"), math.ceil(heads / 4)
    for name in names:
        if name not in FIELDS:
            raise UserError(
                f"encoder.positions.lookhere.fields = {fields} has '{name}'."
                f"{suggestion(name, FIELDS)}"
            )
    if len(names) > runs:
        raise UserError(
            f"encoder.positions.lookhere.fields = {fields} names {len(names)} fields of four heads "
            f"each, but the encoder or its decoder has {heads} heads. Give at most {runs}."
        )
    views: list[tuple[tuple[str, ...], float]] = []
    for number, name in enumerate(names):
        own = runs // len(names) + (number < runs % len(names))
        for head in range(4 * own):
            slope = 4.0 ** -(head // own + 1) if name == "none" else 2.0 ** -(head // 4 + 1)
            views.append((FIELDS[name][head % 4], slope))
    return views[:heads]
