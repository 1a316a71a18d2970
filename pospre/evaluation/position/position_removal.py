"""Removing position from the features by projection (RASA; Franca, Venkataramanan et al. 2025).

Ridge regression reads row and column from a plane. It is projected out of the last layer's patch
tokens; then the next plane is found in the rest, and so on. (Franca trains up to nine planes by
gradient descent behind a sigmoid; least squares gives each directly.) If many directions carry the
same information, each plane removes only one of them. The plane of the covariance with row and
column removes all: after it no linear regression can read either (LEACE, Belrose et al. 2023).
After each plane, both position probes are fitted again on some images and measured on others.
Evaluations such as knn then run on the original encoder, and on the encoder with the projection
after its last norm.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.evaluation.common_settings import Settings
from pospre.evaluation.features import check_images
from pospre.evaluation.layers import planned_encoder
from pospre.evaluation.position.layer_features import (
    Features,
    hold_out,
    layer_features,
    load_images,
)
from pospre.evaluation.position.probes import (
    coordinates_of,
    fit_probes,
    fit_whitening,
    ridge,
    scores,
)
from pospre.evaluation.position.settings import LEAST_IMAGES, PositionRemoval
from pospre.evaluation.registry import Context, Plan, default_settings, evaluate_by_name, figures_of
from pospre.evaluation.run import check_evaluation
from pospre.model.model import PretrainModel

FIGURES = {"r2_left": "min", "top1_left": "min"}


class PlanesRemoved(nn.Module):
    """Projects tokens onto the orthogonal complement of a basis (D, K), around their mean (D,)."""

    def __init__(self, mean_D: Tensor, basis_DK: Tensor) -> None:
        super().__init__()
        self.mean_D: Tensor
        self.basis_DK: Tensor
        self.register_buffer("mean_D", mean_D)
        self.register_buffer("basis_DK", basis_DK)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens (…, D) without their component in the basis."""
        basis_DK = self.basis_DK.to(tokens)
        return tokens - (tokens - self.mean_D.to(tokens)) @ basis_DK @ basis_DK.T


def evaluate(context: Context, settings: PositionRemoval) -> dict[str, Any]:
    """Measure the position left after each plane, and the effect on other evaluations.

    Returns:
        ``steps`` (0 planes, 1 and so on: ``top1``, ``r2``, their standard errors and the share of
        the tokens' variance removed), ``r2_left`` and ``top1_left`` of the last one, and
        ``evaluations``: the figures of each before and after.
    """
    model = context.model
    size, grid = model.encoder.image_size, model.encoder.grid
    batch = load_images(context, size, settings)
    learn, measure = (
        layer_features(context, model, part, [model.encoder.depth], "image", settings)
        for part in hold_out(batch, settings.seed)
    )
    tokens_MD, places_M = learn.tokens[0].flatten(0, 1), learn.shown.flatten()
    if settings.by == "covariance":
        basis = covariance_plane(tokens_MD, places_M, grid)
    else:
        basis = regression_planes(
            tokens_MD, places_M, grid, settings.planes or 9, settings.weight_decay
        )
    steps = []
    for count in range(basis.shape[1] // 2 + 1):
        context.go_on()
        removed = PlanesRemoved(tokens_MD.mean(0), basis[:, : 2 * count])
        steps.append({"planes": count, **_measure(removed, learn, measure, grid, settings)})
    without = without_planes(model, tokens_MD.mean(0), basis)
    return {
        **{f"{key}_left": steps[-1][key] for key in ("r2", "top1")},
        **{f"{key}_left_se": steps[-1][f"{key}_se"] for key in ("r2", "top1")},
        "steps": steps,
        "chance": 1 / (grid[0] * grid[1]),
        "images_learned": len(learn.shown),
        "images_measured": len(measure.shown),
        "evaluations": {
            name: _before_and_after(context, without, name) for name in settings.evaluations
        },
    }


def check(plan: Plan[PositionRemoval]) -> dict[str, tuple[Settings, Any]]:
    """Return the other evaluations; raise a ``UserError`` if one would fail, or for ``planes``."""
    planned_encoder(plan.recipe)
    check_images(plan, LEAST_IMAGES)
    if plan.settings.by == "covariance" and plan.settings.planes not in (None, 1):
        raise UserError(
            f"planes={plan.settings.planes}, but by=covariance removes one plane, after which no "
            "linear regression can read row or column; leave planes out."
        )
    others = {}
    for name in plan.settings.evaluations:
        if not figures_of(name) or name == "position_removal":
            raise UserError(f"evaluations={name} has no figures to compare")
        settings = _settings(name, plan.settings.bank)
        try:
            others[name] = check_evaluation(name, plan.recipe, plan.data, settings, None)
        except UserError as error:
            raise UserError(f"evaluations={name}: {error}") from error
    return others


def covariance_plane(tokens_MD: Tensor, places_M: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return an orthonormal basis (D, 2) of the tokens' covariances with row and column."""
    targets = coordinates_of(places_M, grid)
    centred = (tokens_MD - tokens_MD.mean(0)).double()
    covariance = centred.T @ (targets - targets.mean(0)).double()
    return torch.linalg.qr(covariance).Q.to(tokens_MD.dtype)


def regression_planes(
    tokens_MD: Tensor, places_M: Tensor, grid: tuple[int, int], planes: int, weight_decay: float
) -> Tensor:
    """Return an orthonormal basis (D, 2·planes): two columns per plane, in the order found.

    Ridge regression on whitened tokens gives each plane; there are at most D/2.
    """
    targets = coordinates_of(places_M, grid)
    basis = tokens_MD.new_zeros(tokens_MD.shape[1], 0)
    for _ in range(planes):
        left_MD = PlanesRemoved(tokens_MD.mean(0), basis)(tokens_MD)
        whiten = fit_whitening(left_MD)
        plane = whiten.matrix @ ridge(whiten(left_MD), targets, weight_decay)[:-1]
        plane = plane - basis @ (basis.T @ plane)
        plane = plane / plane.norm(dim=0).clamp_min(1e-12)  # a sequence has no second direction
        basis = torch.linalg.qr(torch.cat([basis, plane], dim=1)).Q
    return basis


def without_planes(model: PretrainModel, mean_D: Tensor, basis_DK: Tensor) -> PretrainModel:
    """Return a copy of the model whose tokens lack the component in the basis."""
    other = copy.deepcopy(model)
    encoder: Any = other.encoder
    encoder.norm = nn.Sequential(encoder.norm, PlanesRemoved(mean_D, basis_DK))
    return other.to(next(model.parameters()).device).eval()


def _measure(
    removed: PlanesRemoved,
    learn: Features,
    measure: Features,
    grid: tuple[int, int],
    settings: PositionRemoval,
) -> dict[str, float]:
    """Return both probes' figures on the remaining tokens, and the variance share removed."""
    known_BTD, asked_BTD = learn.tokens[0], measure.tokens[0]
    known_MD = known_BTD.flatten(0, 1)
    left_MD = removed(known_MD)
    probes = fit_probes(left_MD, learn.shown.flatten(), grid, settings)
    left_BTD = removed(asked_BTD.flatten(0, 1)).view_as(asked_BTD)
    gone = 1 - left_MD.var(0).sum() / known_MD.var(0).sum()
    return {**scores(probes, left_BTD, measure.shown, grid), "variance_removed": float(gone)}


def _settings(name: str, bank: str | None) -> dict[str, Any]:
    """Return the settings of another evaluation: the bank, without untrained baseline."""
    wanted = {"baseline": False, **({} if bank is None else {"bank": bank})}
    return {key: value for key, value in wanted.items() if key in default_settings(name)}


def _before_and_after(
    context: Context, without: PretrainModel, name: str
) -> dict[str, list[float]]:
    """Return the figures of another evaluation with and without the planes."""
    settings, opened = context.opened[name]
    alone = replace(context, folder=None, opened=opened)
    both = [
        evaluate_by_name(name, replace(alone, model=model), settings)
        for model in (context.model, without)
    ]
    return {key: [results[key] for results in both] for key in figures_of(name)}
