"""Relative positions: a learned attention bias by the offset between two cells (BEiT, Swin).

A forgotten place has bias 0 to and from all other tokens. The scheme only supports its own grid, in
whole cells.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre.nn.places import Places
from pospre.nn.positions.scheme import PositionTerms, Scheme, TimmKind, TransformerDims


class RelativeBias(Scheme):
    """Common code of the two relative schemes.

    A table has shape ((2·rows − 1)·(2·columns − 1) + 3, heads) and starts at zero. Its last three
    rows are for prefix to patch, patch to prefix, and prefix to prefix tokens. Without prefix
    tokens they are missing.
    """

    takes_any_grid: ClassVar[bool] = False
    takes_boxes: ClassVar[bool] = False
    timm: ClassVar[TimmKind | None] = "relpos"
    takes_registers: ClassVar[bool] = False

    def reset_parameters(self) -> None:
        """Set all biases to 0."""
        for table in self.parameters():
            nn.init.zeros_(table)

    def index(self, places: Places) -> Tensor:
        """Return the table row of each pair of tokens: int64 (R, T, T)."""
        (rows, cols), prefix = self.dims.grid, self.dims.num_prefix
        table = next(self.parameters())
        cells = places.cells
        if cells is None:
            cells = torch.arange(rows * cols, device=table.device)[None]
        down, across = (
            part[:, :, None] - part[:, None, :] + side - 1
            for part, side in ((cells // cols, rows), (cells % cols, cols))
        )
        index = down * (2 * cols - 1) + across
        if not prefix:
            return index
        index = F.pad(index, (0, 0, prefix, 0), value=len(table) - 3)
        index = F.pad(index, (prefix, 0), value=len(table) - 2)
        among = torch.arange(index.shape[1], device=table.device) < prefix
        return torch.where(among[:, None] & among, len(table) - 1, index)


class Relative(RelativeBias):
    """One table for each block (BEiT's fine-tuning, MP3)."""

    shares_terms = False
    can_fit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tables = nn.ParameterList(_table(self.dims) for _ in range(self.dims.depth))

    def layer_terms(self, places: Places) -> Iterator[PositionTerms]:
        """Yield the bias of each block; all blocks use the same row numbers."""
        index = self.index(places)
        for table in self.tables:
            yield self.terms_of(places, None, _read(table, index))

    def distances(self, places: Places, layer: int) -> Tensor:
        """Return the bias (R, heads, T, T) of block ``layer``."""
        return _read(self.tables[layer], self.index(places))

    @torch.no_grad()
    def fit(self, logits_HNN: Tensor, layer: int, grid: tuple[int, int]) -> None:
        """Set each bias to the mean over all pairs of its offset; those of prefix tokens to 0."""
        table, prefix = self.tables[layer], self.dims.num_prefix
        index = self.index(Places(grid))[0, prefix:, prefix:].flatten()
        sums = torch.zeros_like(table).index_add(0, index, logits_HNN.flatten(1).T.to(table))
        table.copy_(sums / index.bincount(minlength=len(table)).clamp_min(1)[:, None])


class SharedRelative(RelativeBias):
    """One table for all blocks (BEiT, SimMIM)."""

    timm = "shared_relpos"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table = _table(self.dims)

    def distances(self, places: Places, layer: int) -> Tensor:
        """Return the bias (R, heads, T, T), the same for every block."""
        return _read(self.table, self.index(places))


def _read(table: Tensor, index_RTT: Tensor) -> Tensor:
    return table[index_RTT].permute(0, 3, 1, 2).contiguous()


def _table(dims: TransformerDims) -> nn.Parameter:
    rows, cols = dims.grid
    count = (2 * rows - 1) * (2 * cols - 1) + 3 * bool(dims.num_prefix)
    return nn.Parameter(torch.empty(count, dims.num_heads))
