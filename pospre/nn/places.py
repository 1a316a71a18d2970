"""Token positions: methods edit them, position schemes read them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from pospre.batch import Batch, field_box_key, place_keys, readable
from pospre.errors import UserError


class Hidden:
    """A tensor that FSDP2 does not find, and so does not cast to bf16.

    It looks into dataclasses (since torch 2.14), tuples, lists, dicts and what pytree knows.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True, eq=False)
class Places:
    """The position of each patch token in a pass, and whether the encoder may use it.

    A token lies in a cell of its view's grid. The view is a box in a frame: the image, or the field
    that a crop was placed in. Methods *move* or *forget* places. A scheme
    (``pospre.nn.positions``) turns them into embeddings, rotations or attention biases. Prefix
    tokens have no place.

    Shapes: R rows (views, or 1 if all views are alike) and K tokens.

    Attributes:
        grid: (rows, columns) of the view's cells.
        cells: int64 (R, K), row-major cell of each token; None: all cells in order.
        hidden_box: what ``within`` was given; see ``box``.
        known: bool (R, K), whether the encoder may use the place; None: all.
        keys: int64 (R,) draw keys of the views, for a scheme that augments places in training;
            None: no augmentation.
        mark: (1, 1, D), learned, added to forgotten tokens in place of an embedding; None: nothing.
    """

    grid: tuple[int, int]
    cells: Tensor | None = None
    hidden_box: Hidden | None = None
    known: Tensor | None = None
    keys: Tensor | None = None
    mark: Tensor | None = None

    @property
    def box(self) -> Tensor | None:
        """float32 (R, 4), x0, y0, x1, y1 of the view in the frame [0, 1]; None: the whole frame.

        x0 > x1 means that the view and its places are mirrored.
        """
        return None if self.hidden_box is None else self.hidden_box.tensor

    def repeat(self, count: int) -> "Places":
        """Return the places with each row repeated ``count`` times."""
        rows = {"cells": self.cells, "known": self.known, "keys": self.keys}
        parts: dict[str, Any] = {
            name: part.repeat_interleave(count, dim=0)
            for name, part in rows.items()
            if part is not None
        }
        box = None if self.box is None else self.box.repeat_interleave(count, dim=0)
        return replace(self, **parts).within(box)

    def within(self, box_R4: Tensor | None) -> "Places":
        """Return the places of the same tokens with views in these boxes; None: whole frames."""
        return replace(self, hidden_box=None if box_R4 is None else Hidden(box_R4))

    def forget(self, hidden_RK: Tensor, mark: Tensor | None = None) -> "Places":
        """Return the places with these hidden ones forgotten as well."""
        known = ~hidden_RK if self.known is None else self.known & ~hidden_RK
        return replace(self, known=known, mark=self.mark if mark is None else mark)

    def move(self, cells_RK: Tensor) -> "Places":
        """Return the places with the tokens moved to other cells of the grid."""
        return replace(self, cells=cells_RK)

    def check(self) -> None:
        """Raise ``UserError`` for cells outside the grid, and boxes that are rounded or not finite.

        Values are checked on the CPU alone, not in a compiled graph: elsewhere that would wait.
        """
        if self.box is not None and self.box.dtype.itemsize < 4:
            raise UserError(
                f"the boxes of views are rounded to {self.box.dtype}, so their places are wrong; "
                "give them as float32."
            )
        (rows, cols), cells, box = self.grid, readable(self.cells), readable(self.box)
        if cells is not None and not ((cells >= 0) & (cells < rows * cols)).all():
            raise UserError(
                f"places are in cells {cells.min()} to {cells.max()}, but a grid of {rows}×{cols} "
                f"has those from 0 to {rows * cols - 1}, row by row. An editor of places may only "
                "move tokens to these."
            )
        if box is not None and not np.isfinite(box).all():
            raise UserError(
                "the box of a view has a number that is not finite. Give x0, y0, x1 and y1 as "
                "shares of the image ('g/box') or of the field ('g/field_box')."
            )

    def coordinates(self, device: torch.device) -> Tensor:
        """Return float32 (row, column) of every token in the frame [0, 1]: (R, K, 2)."""
        rows, cols = self.grid
        box = self.box
        if box is None:
            box = torch.cat([torch.zeros(1, 2, device=device), torch.ones(1, 2, device=device)], 1)
        row, column = box_centres(box.float(), self.grid)
        table = torch.stack(
            [row[:, :, None].expand(-1, -1, cols), column[:, None, :].expand(-1, rows, -1)], dim=-1
        ).flatten(1, 2)
        if self.cells is None:
            return table
        index = self.cells.unsqueeze(-1).expand(-1, -1, 2)
        return table.expand(len(self.cells), -1, -1).gather(1, index)

    def steps(self, frame: tuple[int, int], device: torch.device) -> Tensor:
        """Return float32 (row, column) of every token in cells, counted from 0: (R, K, 2).

        Views with boxes are measured in cells of ``frame`` (rows, columns), others in cells of
        their grid.
        """
        if self.box is not None:
            return scaled(self.coordinates(device), frame) - 0.5
        cells = self.cells
        if cells is None:
            cells = torch.arange(self.grid[0] * self.grid[1], device=device)[None]
        return torch.stack([cells // self.grid[1], cells % self.grid[1]], dim=-1).float()


# FSDP2 awaits gradients of tensors in a module's output: it must find the mark (before 2.14 by
# pytree alone)
_pytree.register_pytree_node(
    Places,
    lambda places: ([places.mark], places),
    lambda marks, places: replace(places, mark=next(iter(marks))),
)


def view_places(
    batch: Batch, group: str, grid: tuple[int, int], cells_RK: Tensor | None = None
) -> Places:
    """Return the places of patches of a group's views; the views may lie in a position field.

    ``cells_RK`` are the patches of each of R = B·V views; None: all in order.
    """
    box, keys = (batch.get(key) for key in (field_box_key(group), place_keys(group)))
    places = Places(grid, cells_RK, keys=None if keys is None else keys.flatten(0, 1))
    return places.within(None if box is None else box.flatten(0, 1))


def scaled(places_RK2: Tensor, by: Sequence[float]) -> Tensor:
    """Return (row, column) times two numbers, without a tensor of them that would sync the GPU."""
    return torch.stack([part * by[axis] for axis, part in enumerate(places_RK2.unbind(-1))], dim=-1)


def box_centres(box_R4: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the row centres (R, rows) and column centres (R, cols) of grids in boxes."""
    return (
        _centres(box_R4[:, 1], box_R4[:, 3], grid[0]),
        _centres(box_R4[:, 0], box_R4[:, 2], grid[1]),
    )


def mirrored_boxes(box_R4: Tensor, flip_R: Tensor) -> Tensor:
    """Return the boxes (…, 4) with left and right edge exchanged where ``flip_R`` (…) is true."""
    x0, y0, x1, y1 = box_R4.unbind(-1)
    return torch.where(flip_R.unsqueeze(-1), torch.stack([x1, y0, x0, y1], dim=-1), box_R4)


def label_in(
    reference_R4: Tensor, grid: tuple[int, int], query_R4: Tensor, query_grid: tuple[int, int]
) -> Tensor:
    """Return the cell of a view's grid that each patch of another view has its centre in.

    Args:
        reference_R4: boxes of the views with the cells; x0 > x1 if mirrored.
        grid: (rows, columns) of their cells.
        query_R4: boxes of the views with the patches, in the same frame.
        query_grid: (rows, columns) of their patches.

    Returns:
        int64 (R, patches), −1 for patches outside, computed in float64.
    """
    (rows, cols), reference = grid, reference_R4.double()
    row_RH, column_RW = box_centres(query_R4.double(), query_grid)
    x0, y0, x1, y1 = reference.unsqueeze(-1).unbind(1)
    row_RH = ((row_RH - y0) / (y1 - y0) * rows).floor().long().unsqueeze(2)
    column_RW = ((column_RW - x0) / (x1 - x0) * cols).floor().long().unsqueeze(1)
    inside = (row_RH >= 0) & (row_RH < rows) & (column_RW >= 0) & (column_RW < cols)
    return torch.where(inside, row_RH * cols + column_RW, -1).flatten(1)


def _centres(low_R: Tensor, high_R: Tensor, count: int) -> Tensor:
    share = (torch.arange(count, dtype=low_R.dtype, device=low_R.device) + 0.5) / count
    return low_R[:, None] + (high_R - low_R)[:, None] * share
