"""What ``position_removal`` projects out, the probes of what is left, and the controls."""

from typing import Any, NamedTuple

from torch import Tensor

from pospre.batch import Batch
from pospre.evaluation.estimates import Estimate
from pospre.evaluation.position.layer_features import Features, hold_out, layer_features
from pospre.evaluation.position.probes import coordinates_of, fit_probes, scores, unexplained
from pospre.evaluation.position.settings import Blank, PositionRemoval
from pospre.evaluation.position.subspaces import (
    Removed,
    angles_between,
    blank_directions,
    blank_tokens,
    covariance_plane,
    fewest,
    principal_directions,
    random_directions,
    regression_planes,
)
from pospre.evaluation.registry import Context
from pospre.model.model import PretrainModel

_COUNTS = (1, 2, 5, 10, 20, 50)
_NO_POSITION = 0.05  # R²


class Tokens(NamedTuple):
    """Tokens to fit probes to, and to measure them on."""

    learn: Features
    measure: Features
    grid: tuple[int, int]


def tokens_of(
    context: Context, model: PretrainModel, batch: Batch, settings: PositionRemoval
) -> Tokens:
    """Return tokens of a model's last layer, those to measure on from a quarter of the images."""
    learn, asked = (
        layer_features(context, model, part, [model.encoder.depth], "image", settings)
        for part in hold_out(batch, settings.seed)
    )
    return Tokens(learn, asked, model.encoder.grid)


class Removal(NamedTuple):
    """What is projected out.

    Attributes:
        basis_DK: orthonormal directions, in the order of removal.
        mean_D: mean of the tokens that planes, of two directions each, are removed around; None:
            single directions, of tokens of length 1.
        counts: numbers of planes, or of directions, after which the probes are fitted.
        notes: results about the directions themselves.
    """

    basis_DK: Tensor
    mean_D: Tensor | None
    counts: list[int]
    notes: dict[str, Any]

    def by(self, basis_DK: Tensor) -> Removed:
        """Return the module that removes these directions."""
        return Removed(basis_DK, self.mean_D)

    def whole(self, tokens: Tokens) -> Tensor:
        """Return the tokens (M, D) to fit probes to, before anything is removed."""
        return self.by(self.basis_DK[:, :0])(tokens.learn.tokens[0].flatten(0, 1))


def of_images(tokens: Tokens, settings: PositionRemoval) -> Removal:
    """Return the planes of ``by=regression`` or ``by=covariance``."""
    tokens_MD, places_M = tokens.learn.tokens[0].flatten(0, 1), tokens.learn.shown.flatten()
    if settings.by == "covariance":
        basis = covariance_plane(tokens_MD, places_M, tokens.grid)
    else:
        planes = settings.planes or 9
        basis = regression_planes(tokens_MD, places_M, tokens.grid, planes, settings.weight_decay)
    return Removal(basis, tokens_MD.mean(0), [*range(basis.shape[1] // 2 + 1)], {})


def of_blank(
    model: PretrainModel, tokens: Tokens, settings: PositionRemoval, shown: tuple[Tensor, Tensor]
) -> Removal:
    """Return the first directions of the blank image; ``shown`` is of ``shown_by_blank``."""
    directions_DR, values_R = shown
    ridge_only = settings.model_copy(update={"iterations": 1})

    def is_enough(count: int) -> bool:
        removed = Removed(directions_DR[:, :count], None)
        return 1 - measure(removed, tokens, ridge_only)[1].value < _NO_POSITION

    count = settings.planes or fewest(directions_DR.shape[1], is_enough)
    other: Blank = "mean" if settings.blank == "black" else "black"
    theirs_DR, _ = blank_directions(blank_tokens(model, other))
    basis_DK = directions_DR[:, :count]
    angles = angles_between(basis_DK, theirs_DR[:, :count])
    notes = {
        "planes": count,
        "singular_values": (values_R[:5] / model.encoder.num_patches**0.5).tolist(),
        f"angles_to_{other}": [float(each) for each in (angles[0], angles.median(), angles[-1])],
    }
    counts = [0, *(each for each in _COUNTS if each < count), count]
    return Removal(basis_DK, None, counts, notes)


def controls_of(removal: Removal, tokens: Tokens, seed: int) -> dict[str, Tensor]:
    """Return other bases of the same rank, by name."""
    dim, count = removal.basis_DK.shape
    pca_DK = principal_directions(removal.whole(tokens), count)
    return {"random": random_directions(dim, count, seed), "pca": pca_DK}


def measure(
    removed: Removed, tokens: Tokens, settings: PositionRemoval
) -> tuple[dict[str, float], Estimate]:
    """Return both probes' figures on the remaining tokens, and 1 − R² by image."""
    learn, asked, grid = tokens
    left_MD = removed(learn.tokens[0].flatten(0, 1))
    probes = fit_probes(left_MD, learn.shown.flatten(), grid, settings)
    asked_BTD = removed(asked.tokens[0])
    found_BT2 = probes.rows_and_columns(asked_BTD.flatten(0, 1)).view(*asked.shown.shape, 2)
    figures = scores(probes, asked_BTD, asked.shown, grid)
    return figures, unexplained(found_BT2, coordinates_of(asked.shown, grid))
