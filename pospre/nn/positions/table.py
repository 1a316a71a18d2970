"""A table of positions: one vector per grid cell, added to the tokens.

A forgotten place gets one learned vector or nothing instead. For other grids the table is resampled
the way its training code does it. For views in boxes (crops of a position field), it is
interpolated at the centres of the box's cells, bicubic or bilinear.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from pospre.nn.grid import Interpolation, interpolation_weights
from pospre.nn.masking import gather_tokens
from pospre.nn.places import Places, box_centres
from pospre.nn.positions.scheme import Resampling, Scheme, TimmKind

TableGrid = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
_OFFSET = 0.1


@dataclass(eq=False, repr=False)
class Table(Scheme):
    """A table (1, P + rows·cols, dim), under timm's name; rows of prefix tokens come first.

    Attributes:
        grid: (rows, columns) of the table; may differ from the images'.
        is_drawn_larger: enlarging a fresh table draws it anew rather than resampling it.
    """

    table_grid: TableGrid | None = None
    """(rows, columns) of the table; None: as the images. A table of weights keeps its own, and is
    resampled in each pass: there and back, 37×37 and 16×16 lose 6 % of it.
    """
    resampling: Resampling = "bicubic"
    """How it is resampled to another grid: as the code of its weights does."""

    is_added: ClassVar[bool] = True
    timm: ClassVar[TimmKind | None] = "vit"
    learns: ClassVar[bool] = True
    inputs: ClassVar[tuple[str, ...]] = ("pos_embed",)
    is_drawn_larger: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pos_embed: Tensor
        self._first = torch.empty(0)  # what the table was at first, to see whether it has changed
        self.make_room(self.table_grid or self.dims.grid)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the table from N(0, 0.02²); registers have no position."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.pos_embed[:, self._registers] = 0
        self._first = self.pos_embed.detach().clone()

    @property
    def is_fresh(self) -> bool:
        """Whether the table is as it was drawn: neither loaded nor trained."""
        table = self.pos_embed.detach()
        return table.is_meta or torch.equal(self._first.to(table), table)

    def make_room(self, grid: tuple[int, int]) -> None:
        """Allocate a table of ``grid``, not filled yet."""
        count = self.dims.num_prefix + grid[0] * grid[1]
        like = self._parameters.get("pos_embed")
        table = (torch.empty(0) if like is None else like).new_empty(1, count, self.dims.dim)
        learns = self.learns and (like is None or like.requires_grad)
        self.pos_embed = nn.Parameter(table, requires_grad=learns)
        self.grid = grid

    @torch.no_grad()
    def enlarge(self, grid: tuple[int, int], *, resampling: Resampling) -> None:
        """Change the table to ``grid``: draw a fresh one anew, resample any other.

        Prefix tokens keep their rows. Later resampling uses ``resampling``.
        """
        prefix, patches = self.prefix(), self.at(grid)
        is_drawn = self.is_drawn_larger and self.is_fresh
        self.make_room(grid)
        table = self.pos_embed.data
        table[:, : self.dims.num_prefix] = prefix
        self.resampling = resampling
        if is_drawn:
            nn.init.trunc_normal_(table[:, self.dims.num_prefix :], std=0.02)
        else:
            table[0, self.dims.num_prefix :] = patches

    @property
    def _registers(self) -> slice:
        """The rows of registers, which timm's layout requires; they are 0 and do not learn."""
        return slice(int(self.dims.has_class_token), self.dims.num_prefix)

    @property
    def _rows(self) -> Tensor:
        """The table; a fixed one is detached, even if all parameters require gradients."""
        return self.pos_embed if self.learns else self.pos_embed.detach()

    def prefix(self) -> Tensor:
        """Return the rows of the class token and the registers."""
        own = self._rows[:, : int(self.dims.has_class_token)]
        return torch.cat([own, self.pos_embed[:, self._registers].detach()], dim=1)

    def vectors(self) -> Tensor:
        """Return the table, (rows, columns, dim)."""
        return self.at(self.grid).unflatten(0, self.grid)

    @torch.no_grad()
    def exported(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return the table of a whole image of ``grid``, prefix tokens first: (1, P+N, dim)."""
        added = self.embed(Places(grid))
        return {"pos_embed": torch.cat([self.prefix().to(added), added], dim=1)}

    def at(self, grid: tuple[int, int]) -> Tensor:
        """Return the table at the patches of ``grid``, (rows·cols, dim), row-major."""
        own = self._rows[0, self.dims.num_prefix :]
        return resample_positions(own, self.grid, grid, self.resampling)

    def embed(self, places: Places) -> Tensor:
        """Return the table at the places: (R, K, dim)."""
        if places.box is None:
            table = self.at(places.grid)
            return table[None] if places.cells is None else table[places.cells]
        with _exact(places.box.device):
            table = self.in_boxes(places.box, places.grid)
        if places.cells is None:
            return table
        return gather_tokens(table.expand(len(places.cells), -1, -1), places.cells)

    def in_boxes(self, box_R4: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the table at the cell centres of boxes: (R, rows·cols, dim).

        Boxes are axis-aligned, so two matrix products interpolate rows and columns: p = R_y P R_xᵀ.
        Unlike ``F.grid_sample``, this has a deterministic gradient on GPUs.
        """
        own = self._rows[0, self.dims.num_prefix :].unflatten(0, self.grid)
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        width, rows = own.shape[1], grid[0]
        kind: Interpolation = "bilinear" if self.resampling == "bilinear" else "bicubic"
        down, across = (
            interpolation_weights(centres, size, kind)
            for centres, size in zip(box_centres(box_R4.to(own), grid), self.grid, strict=True)
        )
        lines = (down.flatten(0, 1) @ own.flatten(1)).view(-1, rows, width, own.shape[-1])
        return (across.unsqueeze(1) @ lines).flatten(1, 2)


def resample_positions(
    table_ND: Tensor, old: tuple[int, int], new: tuple[int, int], how: Resampling = "bicubic"
) -> Tensor:
    """Return the vectors (rows·cols, D) of the grid ``old`` at the grid ``new`` of the same extent.

    ``how`` is the method of the code that trained the table.
    """
    if old == new:
        return table_ND
    down, across = (_reading(size, count, how) for size, count in zip(old, new, strict=True))
    picture = table_ND.float().unflatten(0, old)
    down, across = (each.to(picture.device, non_blocking=True) for each in (down, across))
    with _exact(picture.device):
        rows = torch.einsum("nh,hwd->nwd", down, picture)
        return torch.einsum("mw,nwd->nmd", across, rows).flatten(0, 1)


def _exact(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast: half precision would shift positions by a tenth of a cell."""
    if device.type == "meta":  # autocast has no such device
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _reading(size: int, count: int, how: Resampling) -> Tensor:
    """Return the weights (count, size) that resample a row of ``size`` cells to ``count``."""
    if how == "antialiased":  # each column of the picture is one old cell
        cells = torch.eye(size)[None, None]
        return F.interpolate(cells, (count, size), mode="bicubic", antialias=True)[0, 0]
    extent = count + (_OFFSET if how == "offset" else 0)
    kind: Interpolation = "bilinear" if how == "bilinear" else "bicubic"
    return interpolation_weights(((torch.arange(count) + 0.5) / extent)[None], size, kind)[0]
