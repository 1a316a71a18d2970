"""Removing position from the features by projection (RASA, Franca 2025; INSID3).

Position is projected out of the last layer's patch tokens. ``by=regression``: ridge regression
reads row and column from a plane; then the next plane is found in the rest, and so on. (RASA trains
up to nine planes by gradient descent behind a sigmoid; least squares gives each directly.) If many
directions carry the same information, each plane removes only one of them. ``by=covariance``: the
plane of the covariance with row and column removes all: after it no linear regression can read
either (LEACE, Belrose et al. 2023). ``by=blank``: the first singular vectors of the tokens of an
image without content, which needs no other image; tokens have length 1 before and after.

After each step, both position probes are fitted again on some images and measured on others. A
random subspace and the first principal components of the same rank are removed for comparison.
Evaluations such as knn then run on the original encoder, and on the encoder with each projection
after its last norm. A removal helps only if it beats the random subspace.

With ``--start``, of a model that was given other positions, position is removed from the start, and
the model stands beside it: its new positions must beat the removal. The first of ``evaluations``
decides, and the others must not be worse. The fit alone, without training, is a run of one step.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.errors import UserError
from pospre.evaluation.common_settings import Settings
from pospre.evaluation.drawing import Cell, as_map, as_picture, draw_cells, save_figure
from pospre.evaluation.estimates import difference
from pospre.evaluation.features import check_images
from pospre.evaluation.layers import planned_encoder
from pospre.evaluation.position.beside_removal import (
    ADAPTED,
    AFTER,
    BEFORE,
    compared,
    encoder_rows,
    figure_rows,
    interval,
    left,
    original_of,
    verdict_on,
)
from pospre.evaluation.position.layer_features import load_images
from pospre.evaluation.position.removals import (
    Removal,
    Tokens,
    controls_of,
    measure,
    of_blank,
    of_images,
    tokens_of,
)
from pospre.evaluation.position.settings import LEAST_IMAGES, Blank, PositionRemoval
from pospre.evaluation.position.subspaces import (
    blank_image,
    check_blank,
    principal_directions,
    shown_by_blank,
    variance_in,
)
from pospre.evaluation.registry import (
    START,
    Context,
    Plan,
    default_settings,
    figures_of,
    named_in_errors,
    settings_class,
    takes_start,
)
from pospre.evaluation.run import check_evaluation
from pospre.model.model import PretrainModel

OPENS_START = True
FIGURES = {"r2_left": "min", "top1_left": "min"}
PICTURE = "position_removal.png"
_MOST_PLANES = 15
_SHOWN = 4
_COMPARABLE = "classification", "dense"


def evaluate(context: Context, settings: PositionRemoval) -> dict[str, Any]:
    """Measure the position left after each step, and the effect on other evaluations.

    Returns:
        ``steps`` (0 planes or directions, 1 and so on: ``top1``, ``r2``, their standard errors and
        the share of the tokens' variance removed), ``r2_left`` and ``top1_left`` of the last one;
        ``controls``: the same for other subspaces of the same rank, with the difference of R² to
        them; ``evaluations``: each figure after the removal, beside that before it and those of the
        controls, with the difference and its paired p. ``low`` to ``high`` is the middle 95 % over
        1,000 samples of the images. For a blank image also its largest singular values in units of
        √N, and the principal angles in degrees to the other blank image's directions. With a start,
        all this is of the start, ``r2_left`` as ``start_r2_left``. Without the prefix it is of the
        model as it is, which stands in ``evaluations`` as ``adapted``, and in ``encoders`` with the
        ``cosine`` of tokens to the start's and ``roll_error``, the largest change of tokens when
        images are shifted around by half their size, in standard deviations. ``verdict`` says
        whether the model is better than the removal.
    """
    adapted, context = context.model, replace(context, model=original_of(context))
    model, blank = context.model, settings.by == "blank"
    shown = shown_by_blank(model, settings) if blank else None  # refused before any image is read
    batch = load_images(context, model.encoder.image_size, settings)
    tokens = tokens_of(context, model, batch, settings)
    removal = of_blank(model, tokens, settings, shown) if shown else of_images(tokens, settings)
    bases = {AFTER: removal.basis_DK, **controls_of(removal, tokens, settings.seed)}
    steps, controls = _probe(context, removal, bases, tokens, settings)
    models = {name: without_basis(model, removal.by(basis)) for name, basis in bases.items()}
    models = {BEFORE: model, **models, **({ADAPTED: adapted} if context.start else {})}
    found = {name: compared(context, models, name) for name in settings.evaluations}
    results = {
        **left(steps[-1]),
        "steps": steps,
        "controls": controls,
        "evaluations": [row for name in found for row in figure_rows(name, found[name], models)],
        **removal.notes,
        "by": settings.by,
        "chance": 1 / model.encoder.num_patches,
        "images_learned": len(tokens.learn.shown),
        "images_measured": len(tokens.measure.shown),
        "pictures": _draw(context, models[AFTER], batch, settings.blank),
    }
    if context.start:
        last = {each["subspace"]: each for each in controls}
        own = tokens_of(context, adapted, batch, settings)
        as_it_is, _ = measure(removal.by(removal.basis_DK[:, :0]), own, settings)
        probed = {BEFORE: steps[0], AFTER: steps[-1], **last, ADAPTED: as_it_is}
        results |= {**left(as_it_is), **left(steps[-1], START), "verdict": verdict_on(found)}
        results["encoders"] = encoder_rows(context, models, probed, batch, settings)
    return results


def check(plan: Plan[PositionRemoval]) -> dict[str, tuple[Settings, Any, str]]:
    """Return the other evaluations; raise a ``UserError`` if one would fail, or for ``planes``."""
    settings = plan.settings
    encoder = planned_encoder(plan.recipe)
    check_images(plan, LEAST_IMAGES)
    if settings.by == "blank":
        if not plan.has_start:  # its own encoder shows the blank image
            check_blank(encoder, settings.planes)
    elif settings.blank != "black":
        raise UserError(f"blank={settings.blank} needs by=blank, not by={settings.by}.")
    if settings.by == "covariance" and settings.planes not in (None, 1):
        raise UserError(
            f"planes={settings.planes}, but by=covariance removes one plane, after which no "
            "linear regression can read row or column; leave planes out."
        )
    if settings.by == "regression" and (settings.planes or 0) > _MOST_PLANES:
        raise UserError(
            f"planes={settings.planes}, but by=regression removes {_MOST_PLANES} at most."
        )
    return {name: _opened(plan, name, given) for name, given in settings.evaluations.items()}


def _opened(
    plan: Plan[PositionRemoval], name: str, given: Mapping[str, Any]
) -> tuple[Settings, Any, str]:
    """Return an evaluation's settings, what it opened and its data."""
    kind = settings_class(name).__module__.split(".")[-2]
    if not takes_start(name) or not figures_of(name) or kind not in _COMPARABLE:
        raise UserError(
            f"evaluations={name} has no figures to compare image by image; give some of "
            "correspondence, depth, detection, knn, linear, logistic, segmentation, "
            "video_segmentation"
        )
    bank = {} if plan.settings.bank is None else {"bank": plan.settings.bank}
    usual = {"baseline": False, **bank}
    wanted = {key: value for key, value in usual.items() if key in default_settings(name)}
    wanted |= {key: value for key, value in given.items() if key != "data"}
    data = str(given.get("data", plan.data))
    with named_in_errors(f"evaluations={name}"):
        checked = check_evaluation(name, plan.recipe, data, wanted, None)
    return checked.settings, checked.opened, data


def without_basis(model: PretrainModel, removed: nn.Module) -> PretrainModel:
    """Return the model with the same tensors and a module after its encoder's last norm."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, tensors)
    encoder: Any = other.encoder
    encoder.norm = nn.Sequential(encoder.norm, removed)
    return other.to(next(model.parameters()).device).eval()


def _probe(
    context: Context,
    removal: Removal,
    bases: Mapping[str, Tensor],
    tokens: Tokens,
    settings: PositionRemoval,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the probes' figures after each step, and those of the controls.

    These are measured after the last step, and for a blank image after each.
    """
    whole_MD, size = removal.whole(tokens), 1 if removal.mean_D is None else 2
    steps: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for count in removal.counts:
        context.go_on()
        some = {name: basis_DK[:, : size * count] for name, basis_DK in bases.items()}
        if count == 0 or (size == 2 and count < removal.counts[-1]):
            some = {AFTER: some[AFTER]}
        found = {name: measure(removal.by(each), tokens, settings) for name, each in some.items()}
        for name, (figures, missed) in found.items():
            row = {**figures, "variance_removed": variance_in(whole_MD, some[name])}
            if name == AFTER:
                steps.append({"planes": count, **row})
                continue
            less = difference(missed, found[AFTER][1])  # of 1 − R²
            gain = {"r2_difference": less.difference, **interval(less)}
            beside.append({"planes": count, "subspace": name, **row, **gain})
    return steps, beside


@torch.no_grad()
def _draw(context: Context, without: PretrainModel, batch: Batch, blank: Blank) -> list[str]:
    """Write some images and the blank one, and their tokens before and after the removal.

    The colours of each row are its tokens' first three principal components.
    """
    if context.folder is None:
        return []
    few = {key: value[:_SHOWN].to(context.device) for key, value in batch.items()}
    images = torch.cat([blank_image(context.model, blank), context.model.images(few)[:, 0]])
    augment, grid = context.model.augment, context.model.encoder.grid
    levels = (255 * (images * augment.std + augment.mean)).round().clamp(0, 255).to(torch.uint8)
    rows = [[Cell(grid, image=as_picture(each)) for each in levels]]
    for model in (context.model, without):
        tokens_BND = model.encoder(images)[:, model.encoder.num_prefix_tokens :].float().cpu()
        tokens_MD = tokens_BND.flatten(0, 1)
        colours = (tokens_MD - tokens_MD.mean(0)) @ principal_directions(tokens_MD, 3)
        colours = (colours / (4 * colours.std(0)) + 0.5).clamp(0, 1).view(*tokens_BND.shape[:2], 3)
        rows.append([Cell(grid, heat=as_map(each, grid)) for each in colours])
    figure = draw_cells(rows, ["image", "tokens", "position removed"])
    return [save_figure(figure, context.folder, PICTURE)]
