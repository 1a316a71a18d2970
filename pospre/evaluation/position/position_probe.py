"""Linear probes for position in the frozen tokens of every layer (beyond DropPos, Table 7).

For every layer, a linear classifier predicts at which of the N places a patch is shown (top-1,
chance 1/N). Ridge regression predicts row and column (R²). Both are fitted on some images and
measured on others. Controls are given with them: the encoder with random weights; the image with
all places forgotten, where only content helps; images of one colour, where only positions help;
DropPos's own, with 75 % of the positions masked and these patches measured; and shuffled patches,
where content and positions contradict each other: the probe of ordinary images then predicts one of
the two places.

With many places, accuracy depends on the number of training patches. The accuracy on the training
patches is therefore given too; if it is much higher, there were too few.
"""

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pospre.batch import INDEX, Batch
from pospre.errors import UserError
from pospre.evaluation.drawing import new_figure, save_figure
from pospre.evaluation.features import check_images
from pospre.evaluation.layers import check_grid, chosen_layers, planned_encoder
from pospre.evaluation.models import open_model
from pospre.evaluation.position.layer_features import (
    Input,
    hold_out,
    layer_features,
    load_images,
)
from pospre.evaluation.position.probes import fit_probes, scores
from pospre.evaluation.position.settings import LEAST_IMAGES, PositionProbe
from pospre.evaluation.registry import START, Context, Plan
from pospre.model.model import PretrainModel

FIGURES = dict.fromkeys(("top1", "masked_top1", "content_top1", "r2", "content_r2"), "max")
MEMORY = 2**30  # bytes of tokens at once; layers that do not fit are encoded in turn
PICTURE = "position_over_depth.png"
COLOURS = {"image": "C0", "masked": "C1", "content": "C2", "constant": "C7", "shuffled": "C3"}
LINES = {"trained": "-", "versus": "--", "start": "-.", "untrained": ":"}
TRAINED: tuple[Input, ...] = ("image", "masked", "content", "constant")
UNTRAINED: tuple[Input, ...] = ("image", "masked", "content")
SHOWN_AS = {
    "image": "image",
    "masked": "75 % masked",
    "content": "no positions",
    "constant": "one colour",
    "shuffled": "shuffled",
}


def evaluate(context: Context, settings: PositionProbe) -> dict[str, Any]:
    """Measure every layer.

    Returns:
        ``rows``, one dict per grid, model, input and layer: ``top1`` in [0, 1] and ``r2``, each
        with its standard error over the measured images; ``learned_top1`` and ``learned_r2`` over
        the training images. Beside them the last layer's figures at the training grid.
    """
    models = {"trained": context.model}
    if settings.versus is not None:
        models["versus"] = context.opened.eval().to(context.device)
    if context.start is not None:
        models["start"] = context.start()
    if settings.baseline:
        models["untrained"] = context.initial()
    encoder = context.model.encoder
    rows: list[dict[str, Any]] = []
    for grid in dict.fromkeys([encoder.grid, *settings.grids]):
        size = grid[0] * encoder.patch_size[0], grid[1] * encoder.patch_size[1]
        batch = load_images(context, size, settings)
        for name, model in models.items():
            measured = probe_model(context, settings, name, model, batch, grid)
            rows += [{"grid": list(grid), "model": name, **row} for row in measured]
    learn, measure = hold_out(batch, settings.seed)
    last = list(encoder.grid), max(row["layer"] for row in rows)
    start = {} if context.start is None else _figures(rows, "start", *last)
    results = {
        **_figures(rows, "trained", *last),
        **{f"{START}{key}": value for key, value in start.items()},
        "rows": rows,
        "chance": 1 / encoder.num_patches,
        "images_learned": len(learn[INDEX]),
        "images_measured": len(measure[INDEX]),
        "pictures": [] if context.folder is None else [PICTURE],
    }
    if context.folder is not None:
        _draw(results, context.folder)
    return results


def check(plan: Plan[PositionProbe]) -> PretrainModel | None:
    """Return the model of ``versus``; raise a ``UserError`` for what cannot be probed."""
    recipe, settings = plan.recipe, plan.settings
    encoder = planned_encoder(recipe, settings.layers)
    for grid in settings.grids:
        check_grid(encoder, grid, f"grids={grid[0]}x{grid[1]}")
    check_images(plan, LEAST_IMAGES)
    if settings.versus is None:
        return None
    other = open_model(settings.versus).model
    for key in ("image_size", "patch_size", "depth"):
        theirs, ours = getattr(other.encoder, key), getattr(encoder, key)
        if theirs != ours:
            raise UserError(
                f"the encoder of versus={settings.versus} has {key} = {theirs}, but the measured "
                f"one has {ours}; give another training of the same encoder."
            )
    for grid in settings.grids:
        check_grid(other.encoder, grid, f"grids={grid[0]}x{grid[1]}, versus={settings.versus}")
    return other


def probe_model(
    context: Context,
    settings: PositionProbe,
    name: str,
    model: PretrainModel,
    batch: Batch,
    grid: tuple[int, int],
) -> list[dict[str, Any]]:
    """Return the figures of one model at one grid, one dict per input and layer."""
    inputs = UNTRAINED if name == "untrained" else TRAINED
    if not model.encoder.positions.can_forget:
        inputs = ("image",)  # without positions, nothing can be forgotten
    layers = chosen_layers(settings.layers, model.encoder.depth)
    learn, measure = hold_out(batch, settings.seed)
    tokens = len(learn[INDEX]) * min(settings.num_tokens, grid[0] * grid[1])
    most = max(1, MEMORY // (4 * model.encoder.embed_dim * tokens))
    rows = []
    for shown_as, start in itertools.product(inputs, range(0, len(layers), most)):
        some = layers[start : start + most]
        read = partial(layer_features, context, model, layers=some, settings=settings)
        known, asked = (read(part, shown_as=shown_as) for part in (learn, measure))
        shuffled = None
        if shown_as == "image" and name != "untrained":
            shuffled = read(measure, shown_as="shuffled")
        for number, layer in enumerate(some):
            context.go_on()
            tokens_MD = known.tokens[number].flatten(0, 1).to(context.device)
            places_M = known.shown.flatten().to(context.device)
            probes = fit_probes(tokens_MD, places_M, grid, settings)
            again = scores(probes, known.tokens[number], known.shown, grid)
            learned = {f"learned_{key}": again[key] for key in ("top1", "r2")}
            row = {"shown_as": shown_as, "layer": layer, **learned}
            rows.append({**row, **scores(probes, asked.tokens[number], asked.shown, grid)})
            if shuffled is not None:
                moved = shuffled.tokens[number], shuffled.shown
                figures = scores(probes, *moved, grid, shuffled.origin)
                rows.append({"shown_as": "shuffled", "layer": layer, **figures})
    return rows


def _figures(
    rows: list[dict[str, Any]], model: str, grid: list[int], layer: int
) -> dict[str, float | None]:
    """Return a model's figures for one layer and grid; None if not measured."""
    last = {
        row["shown_as"]: row
        for row in rows
        if (row["grid"], row["model"], row["layer"]) == (grid, model, layer)
    }
    names = {"": "image", "masked_": "masked", "content_": "content"}
    return {
        f"{prefix}{key}": last.get(shown_as, {}).get(key)
        for prefix, shown_as in names.items()
        for key in ("top1", "top1_se", "r2", "r2_se")
    }


def _draw(results: Mapping[str, Any], folder: Path) -> None:
    """Draw top-1 and R² over the layers, one row of panels per grid, with two standard errors."""
    grids = list(dict.fromkeys(tuple(row["grid"]) for row in results["rows"]))
    figure = new_figure(11, 4 * len(grids))
    panels = figure.subplots(len(grids), 2, squeeze=False)
    for grid, (left, right) in zip(grids, panels, strict=True):
        rows = [row for row in results["rows"] if tuple(row["grid"]) == grid]
        for model, shown_as in dict.fromkeys((row["model"], row["shown_as"]) for row in rows):
            line = [row for row in rows if (row["model"], row["shown_as"]) == (model, shown_as)]
            layers = [row["layer"] for row in line]
            style = {"color": COLOURS[shown_as], "linestyle": LINES[model], "capsize": 2}
            heights, errors = [100 * r["top1"] for r in line], [200 * r["top1_se"] for r in line]
            left.errorbar(layers, heights, errors, label=f"{model}: {SHOWN_AS[shown_as]}", **style)
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
    save_figure(figure, folder, PICTURE)
