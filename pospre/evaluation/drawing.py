"""Figures of analyses: grids of maps, alone or over images, and curves over the layers."""

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: it could open a window
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pospre.output import save_picture, write_output

DPI = 110


@dataclass(frozen=True)
class Cell:
    """One map of a grid of maps.

    Attributes:
        grid: (rows, columns) of patches.
        heat: (rows, columns) values, or (rows, columns, 3) colours in [0, 1]; None shows the image.
        image: uint8 (H, W, 3) behind the map, see ``as_picture``; None shows the values alone.
        marks: flat indices of patches to mark with a point.
        mark_colours: colours of the points, cycled.
        limits: values of the first and the last colour; None: the map's own range.
        colours: matplotlib's name of a colour map.
    """

    grid: tuple[int, int]
    heat: np.ndarray | None = None
    image: np.ndarray | None = None
    title: str = ""
    marks: Sequence[int] = ()
    mark_colours: Sequence[str] = ("red",)
    limits: tuple[float, float] | None = None
    colours: str = "viridis"


def as_picture(view_CHW: Tensor) -> np.ndarray:
    """Return a view as uint8 (H, W, 3); unless it has three channels, as their grey mean."""
    if len(view_CHW) == 3 and view_CHW.dtype == torch.uint8:
        return view_CHW.permute(1, 2, 0).cpu().numpy()
    grey = view_CHW.double().mean(0)
    grey = (grey - grey.min()) / (grey.max() - grey.min()).clamp_min(1e-12)
    return (255 * grey).round().to(torch.uint8)[..., None].expand(-1, -1, 3).cpu().numpy()


def as_map(values_N: Tensor, grid: tuple[int, int]) -> np.ndarray:
    """Return one value, or one vector, per patch as a picture (rows, columns, …)."""
    return values_N.float().unflatten(0, grid).cpu().numpy()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with a size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def save_groups(
    groups: Sequence[Sequence[Cell]], count: int, folder: Path | None, name: str, title: str = ""
) -> list[str]:
    """Write groups of cells, ``count`` per row, as the PNG ``name``; return the name.

    Without a folder or groups nothing is written, and no name is returned.
    """
    if folder is None or not groups:
        return []
    starts = range(0, len(groups), count)
    rows = [[cell for group in groups[at : at + count] for cell in group] for at in starts]
    return [save_figure(draw_cells(rows, title=title), folder, name)]


def draw_cells(
    rows: Sequence[Sequence[Cell]],
    labels: Sequence[str] = (),
    *,
    title: str = "",
    side: float = 1.6,
) -> Figure:
    """Return a figure of maps in rows, which may differ in length, each with a label to its left.

    ``side`` is the length of a cell's longer side in inches.
    """
    columns = max(len(row) for row in rows)
    tall, wide = rows[0][0].grid
    height, width = (side * part / max(tall, wide) for part in (tall, wide))
    figure = new_figure(columns * max(width, 0.5) + 0.6, len(rows) * (height + 0.25) + 0.5)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, row in zip(axes, rows, strict=True):
        for axis, cell in zip(line, row, strict=False):
            _show(axis, cell)
        for axis in line[len(row) :]:
            axis.remove()
    for line, label in zip(axes, labels, strict=False):
        line[0].set_ylabel(label, fontsize=8)
    figure.suptitle(textwrap.fill(title, int(14 * figure.get_figwidth())), fontsize=9)
    return figure


def _show(axis: Axes, cell: Cell) -> None:
    rows, columns = cell.grid
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)  # in patches, so that all layers align
    over = cell.image is not None and cell.heat is not None
    if cell.image is not None:
        image = cell.image.mean(-1) if over else cell.image  # keep colours for the map
        axis.imshow(image, cmap="gray", vmin=0, vmax=255, extent=extent)
    if cell.heat is not None:
        low, high = cell.limits or (None, None)
        axis.imshow(
            cell.heat,
            cmap=cell.colours,
            vmin=low,
            vmax=high,
            extent=extent,
            alpha=0.6 if over else 1.0,
            interpolation="bilinear" if over else "nearest",
        )
    for mark, colour in zip(cell.marks, itertools.cycle(cell.mark_colours), strict=False):
        row, column = divmod(mark, columns)
        axis.plot(column, row, "o", color=colour, markeredgecolor="white", markersize=5)
    axis.set_title(cell.title, fontsize=7, pad=2)
    axis.set_xticks([])
    axis.set_yticks([])


def draw_depth(
    axis: Axes, layers: Sequence[Mapping[str, Any]], name: str, label: str, *, heads: bool = False
) -> None:
    """Draw the figure ``name`` over the layers with two standard errors (``<name>_se``).

    With ``heads``, each of the layers' ``heads`` is a dot.
    """
    numbers = [row["layer"] for row in layers]
    if heads:
        for row in layers:
            values = row["heads"][name]
            axis.plot([row["layer"]] * len(values), values, ".", color="0.7", markersize=4)
    bars = [2 * (row[f"{name}_se"] or 0.0) for row in layers]
    means = [row[name] for row in layers]
    axis.errorbar(numbers, means, yerr=bars, marker="o", markersize=3, capsize=2)
    axis.set(xlabel="layer", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def save_figure(figure: Figure, folder: Path, name: str) -> str:
    """Write a figure as the PNG ``name`` in ``folder``; return the name."""
    save_picture(figure, folder / name, DPI)
    return name


def save_arrays(arrays: Mapping[str, Tensor], folder: Path, name: str) -> str:
    """Write float32 arrays as the NumPy archive ``name`` in ``folder``; return the name."""
    members: dict[str, Any] = {key: value.float().cpu().numpy() for key, value in arrays.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **members)
    write_output(folder / name, buffer.getvalue())
    return name
