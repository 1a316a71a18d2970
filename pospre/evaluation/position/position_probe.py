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

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from pospre.batch import INDEX, Batch
from pospre.errors import UserError
from pospre.evaluation.classification.knn import all_layers
from pospre.evaluation.drawing import check_pictures
from pospre.evaluation.layers import check_grid, planned_encoder
from pospre.evaluation.models import open_model
from pospre.evaluation.position.layer_features import (
    BATCH,
    Features,
    Input,
    check_images,
    hold_out,
    layer_features,
    load_images,
)
from pospre.evaluation.position.probe_picture import draw_depth
from pospre.evaluation.position.probes import fit_probes, scores
from pospre.evaluation.position.settings import PositionProbe
from pospre.evaluation.registry import Context, Plan
from pospre.evaluation.settings import Sampling
from pospre.model.model import PretrainModel
from pospre.text_table import format_table

FIGURES = {
    "top1": "max",
    "masked_top1": "max",
    "content_top1": "max",
    "r2": "max",
    "content_r2": "max",
}
HELD_OUT = 0.25
MEMORY = 2**30  # bytes of tokens at once; layers that do not fit are encoded in turn
PICTURE = "position_over_depth.png"
TRAINED: tuple[Input, ...] = ("image", "masked", "content", "constant")
UNTRAINED: tuple[Input, ...] = ("image", "masked", "content")
SHOWN_AS = {
    "image": "image",
    "masked": "75 % masked",
    "content": "no positions",
    "constant": "one colour",
    "shuffled": "shuffled",
}


class Work(NamedTuple):
    """The work per model: see the settings of ``evaluate``."""

    settings: PositionProbe
    layers: tuple[int, ...]
    num_tokens: int
    context: Context
    bar: Any

    def features(
        self, model: PretrainModel, batch: Batch, layers: Sequence[int], shown_as: Input
    ) -> Features:
        """Return ``layer_features``; the progress bar moves with every forward pass."""

        def step(count: int) -> None:
            self.bar.update(count)
            self.context.go_on()

        return layer_features(
            model,
            batch,
            layers,
            shown_as,
            num_tokens=self.num_tokens,
            seed=self.settings.seed,
            device=self.context.device,
            step=step,
        )

    def parts(self, width: int, images: int) -> Iterator[tuple[int, ...]]:
        """Yield groups of layers whose tokens fit into ``MEMORY``."""
        most = max(1, MEMORY // (4 * width * images * self.num_tokens))
        for start in range(0, len(self.layers), most):
            yield self.layers[start : start + most]


def evaluate(context: Context, settings: PositionProbe) -> dict[str, Any]:
    """Measure every layer.

    Returns:
        ``rows`` (one dict per grid, model, input and layer: ``top1`` in [0, 1] and ``r2``, each
        with its standard error over the measured images, and ``learned_top1`` and ``learned_r2``
        over the training images), and the last layer's figures at the training grid.
    """
    models = {"trained": context.model}
    if settings.versus is not None:
        models["versus"] = context.opened.eval().to(context.device)
    if settings.baseline:
        models["untrained"] = context.initial()
    encoder = context.model.encoder
    chosen = all_layers(settings.layers, encoder.depth) or ()
    rows: list[dict[str, Any]] = []
    counts: list[int] = []
    sampling = Sampling(settings.num_samples, BATCH, settings.num_workers, settings.seed)
    for grid in dict.fromkeys([encoder.grid, *settings.grids]):
        size = grid[0] * encoder.patch_size[0], grid[1] * encoder.patch_size[1]
        title = f"position_probe {grid[0]}x{grid[1]}"
        batch = load_images(context, size, title=title, sampling=sampling)
        learn, measure = hold_out(batch, HELD_OUT, settings.seed)
        counts = [len(learn[INDEX]), len(measure[INDEX])]
        with tqdm(desc="encoding, fitting", unit="img", disable=not context.progress) as bar:
            tokens = min(settings.num_tokens, grid[0] * grid[1])
            work = Work(settings, chosen, tokens, context, bar)
            for name, model in models.items():
                found = probe_model(work, model, learn, measure, grid, name)
                rows += [{"grid": list(grid), "model": name, **row} for row in found]
    results = {
        **_figures(rows, list(encoder.grid), chosen[-1]),
        "rows": rows,
        "chance": 1 / encoder.num_patches,
        "images_learned": counts[0],
        "images_measured": counts[1],
        "num_tokens": settings.num_tokens,
        "pictures": [] if context.folder is None else [PICTURE],
    }
    if context.folder is not None:
        draw_depth(results, SHOWN_AS, context.folder / PICTURE)
    return results


def check(plan: Plan[PositionProbe]) -> PretrainModel | None:
    """Return the model of ``versus``; raise a ``UserError`` for what cannot be probed."""
    recipe, settings = plan.recipe, plan.settings
    encoder = planned_encoder(recipe, settings.layers)
    for grid in settings.grids:
        check_grid(encoder, grid, f"grids={grid[0]}x{grid[1]}")
    check_images(plan)
    check_pictures(plan)
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
    work: Work,
    model: PretrainModel,
    learn: Batch,
    measure: Batch,
    grid: tuple[int, int],
    name: str,
) -> list[dict[str, Any]]:
    """Return the figures of one model at one grid, one dict per input and layer."""
    inputs = UNTRAINED if name == "untrained" else TRAINED
    if not model.encoder.positions.can_forget:
        inputs = ("image",)  # without positions, nothing can be forgotten
    rows = []
    images = len(learn[INDEX])
    decay, steps = work.settings.weight_decay, work.settings.iterations
    fit = partial(fit_probes, grid=grid, weight_decay=decay, iterations=steps)
    for shown_as in inputs:
        for layers in work.parts(model.encoder.embed_dim, images):
            known = work.features(model, learn, layers, shown_as)
            asked = work.features(model, measure, layers, shown_as)
            shuffled = None
            if shown_as == "image" and name != "untrained":
                shuffled = work.features(model, measure, layers, "shuffled")
            for number, layer in enumerate(layers):
                work.context.go_on()
                tokens_MD = known.tokens[number].flatten(0, 1).to(work.context.device)
                probes = fit(tokens_MD, known.shown.flatten().to(tokens_MD.device))
                again = scores(probes, known.tokens[number], known.shown, grid)
                learned = {f"learned_{key}": again[key] for key in ("top1", "r2")}
                row = {"shown_as": shown_as, "layer": layer, **learned}
                rows.append({**row, **scores(probes, asked.tokens[number], asked.shown, grid)})
                if shuffled is not None:
                    found = scores(
                        probes, shuffled.tokens[number], shuffled.shown, grid, shuffled.origin
                    )
                    rows.append({"shown_as": "shuffled", "layer": layer, **found})
    return rows


def _figures(rows: list[dict[str, Any]], grid: list[int], layer: int) -> dict[str, float | None]:
    """Return the trained model's figures for one layer and grid; None if not measured."""
    last = {
        row["shown_as"]: row
        for row in rows
        if (row["grid"], row["model"], row["layer"]) == (grid, "trained", layer)
    }
    names = {"": "image", "masked_": "masked", "content_": "content"}
    return {
        f"{prefix}{key}": last.get(shown_as, {}).get(key)
        for prefix, shown_as in names.items()
        for key in ("top1", "top1_se", "r2", "r2_se")
    }


def table(results: Mapping[str, Any]) -> str:
    """Return one table per grid: models and inputs as rows, layers as columns."""
    grids = dict.fromkeys(tuple(row["grid"]) for row in results["rows"])
    return "\n\n".join(_grid_table(results, list(grid)) for grid in grids)


def _grid_table(results: Mapping[str, Any], grid: list[int]) -> str:
    rows = [row for row in results["rows"] if row["grid"] == grid]
    layers = sorted({row["layer"] for row in rows})
    lines: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["layer"]):
        name = f"{row['model']}, {SHOWN_AS[row['shown_as']]}"
        second = (": origin", row["origin_top1"]) if "origin_top1" in row else (": R²", row["r2"])
        for key, value in ((": top-1", row["top1"]), second):
            text = f"{value:.2f}" if key == ": R²" else f"{100 * value:.1f}"
            lines.setdefault(name + key, []).append(text)
    largest = max(row["top1_se"] for row in rows)
    count = grid[0] * grid[1]
    notes = [
        f"chance: {100 / count:.2f} and 0; largest standard error of a top-1: {100 * largest:.2f}",
        f"{results['images_learned']} images learned from, {results['images_measured']} measured "
        f"on, {min(results['num_tokens'], count)} patches of each",
        _widest_gap(rows),
        "shuffled: the probe of ordinary images predicts where a patch is shown (top-1), or where "
        "it came from (origin)",
    ]
    return format_table(
        f"Position in the tokens of {grid[0]} x {grid[1]} patches: top-1 in %, R² of row, column",
        ["layer", *map(str, layers)],
        [[name, *cells] for name, cells in lines.items()],
        notes,
    )


def _widest_gap(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the largest gap between accuracy on training and on measured patches."""
    gaps = [(row["learned_top1"] - row["top1"], row) for row in rows if "learned_top1" in row]
    row = max(gaps, key=lambda each: each[0])[1]
    return (
        f"learned and not: {100 * row['learned_top1']:.1f} % of the training patches are placed "
        f"right, but {100 * row['top1']:.1f} % of the others ({row['model']}, "
        f"{SHOWN_AS[row['shown_as']]}, layer {row['layer']}); more num_samples and num_tokens "
        "close the gap"
    )
