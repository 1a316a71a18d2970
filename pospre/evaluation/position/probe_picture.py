"""The figure of ``position_probe``: position over depth."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pospre.evaluation.drawing import new_figure, save_figure

COLOURS = {"image": "C0", "masked": "C1", "content": "C2", "constant": "C7", "shuffled": "C3"}
LINES = {"trained": "-", "versus": "--", "untrained": ":"}


def draw_depth(results: Mapping[str, Any], names: Mapping[str, str], path: Path) -> None:
    """Draw top-1 and R² over the layers, one row of panels per grid, with two standard errors.

    Args:
        results: of ``position_probe``.
        names: descriptions of the encoder's inputs, by key.
        path: of the PNG.

    Raises:
        UserError: it cannot be written.
    """
    grids = list(dict.fromkeys(tuple(row["grid"]) for row in results["rows"]))
    figure = new_figure(11, 4 * len(grids))
    panels = figure.subplots(len(grids), 2, squeeze=False)
    for grid, (left, right) in zip(grids, panels, strict=True):
        rows = [row for row in results["rows"] if tuple(row["grid"]) == grid]
        for model, shown_as in dict.fromkeys((row["model"], row["shown_as"]) for row in rows):
            line = [row for row in rows if (row["model"], row["shown_as"]) == (model, shown_as)]
            style = {"color": COLOURS[shown_as], "linestyle": LINES[model], "capsize": 2}
            label = f"{model}: {names[shown_as]}"
            layers = [row["layer"] for row in line]
            left.errorbar(
                layers,
                [100 * row["top1"] for row in line],
                [200 * row["top1_se"] for row in line],
                label=label,
                **style,
            )
            if shown_as != "shuffled":
                heights, errors = [r["r2"] for r in line], [2 * r["r2_se"] for r in line]
                right.errorbar(layers, heights, errors, **style)
        left.axhline(100 / (grid[0] * grid[1]), color="0.6", linewidth=0.8)
        right.axhline(0, color="0.6", linewidth=0.8)
        right.set_ylim(-0.3, 1.05)
        left.set_title(f"which of {grid[0]} × {grid[1]} places: top-1 in % (grey: chance)")
        right.set_title("row and column: R²")
        for panel in (left, right):
            panel.set_xlabel("layer (0: embedding)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, path.parent, path.name)
