"""Linear probes that read positions from tokens: one of N places, or row and column.

Both are fitted to whitened tokens, where L-BFGS needs few steps: tokens are centred, and divided
along each principal axis by its standard deviation. Directions with less than a thousandth of the
mean variance are shrunk rather than amplified.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.evaluation.classification.logistic import classify, logistic
from pospre.evaluation.estimates import Estimate, mean_and_error, share, standard_error
from pospre.evaluation.position.settings import Tokens

SHRINKAGE = 1e-3


class Whitening(NamedTuple):
    """A linear map of tokens: ``(tokens − mean) @ matrix`` has nearly unit covariance."""

    mean: Tensor
    matrix: Tensor

    def __call__(self, tokens_MD: Tensor) -> Tensor:
        """Return the whitened tokens."""
        return (tokens_MD - self.mean) @ self.matrix


class Probes(NamedTuple):
    """Both probes of whitened tokens: (D+1, N) and (D+1, 2), bias last."""

    whiten: Whitening
    classifier: Tensor
    coordinates: Tensor

    def places(self, tokens_MD: Tensor) -> Tensor:
        """Return the most likely place (M,) of each token."""
        return classify(_with_one(self.whiten(tokens_MD)), self.classifier)

    def rows_and_columns(self, tokens_MD: Tensor) -> Tensor:
        """Return the predicted row and column (M, 2) of each token, in patches."""
        return _with_one(self.whiten(tokens_MD)) @ self.coordinates


def fit_whitening(tokens_MD: Tensor) -> Whitening:
    """Return the whitening of tokens (see the module)."""
    mean = tokens_MD.mean(0)
    centred = (tokens_MD - mean).double()
    variance, axes = torch.linalg.eigh(centred.T @ centred / len(centred))
    variance = variance.clamp_min(0)
    scale = (variance + SHRINKAGE * variance.mean().clamp_min(1e-12)).rsqrt()
    return Whitening(mean, (axes * scale).to(tokens_MD.dtype))


def fit_probes(
    tokens_MD: Tensor, places_M: Tensor, grid: tuple[int, int], settings: Tokens
) -> Probes:
    """Fit both probes to tokens and their places, row-major.

    The weight decay is the factor of half the squared weights, added to the mean cross-entropy; and
    of the squared weights, added to the mean squared error.
    """
    whiten, decay = fit_whitening(tokens_MD), settings.weight_decay
    white_MD = whiten(tokens_MD)
    count = grid[0] * grid[1]
    classifier = logistic(_with_one(white_MD), places_M, count, decay, settings.iterations)
    return Probes(whiten, classifier, ridge(white_MD, coordinates_of(places_M, grid), decay))


def ridge(features_MD: Tensor, targets_MK: Tensor, weight_decay: float) -> Tensor:
    """Return the weights (D+1, K), bias last, that minimise mean squares + decay · ‖weights‖²."""
    mean_D, mean_K = features_MD.mean(0), targets_MK.mean(0)
    centred, wanted = features_MD - mean_D, targets_MK - mean_K
    gram = centred.T @ centred / len(centred)
    gram.diagonal().add_(weight_decay)
    weights_DK = torch.linalg.solve(gram, centred.T @ wanted / len(centred))
    return torch.cat([weights_DK, (mean_K - mean_D @ weights_DK).unsqueeze(0)])


def coordinates_of(places: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the row and column (…, 2) of places, in patches, as float32."""
    return torch.stack([places // grid[1], places % grid[1]], dim=-1).float()


def scores(
    probes: Probes,
    tokens_BTD: Tensor,
    shown_BT: Tensor,
    grid: tuple[int, int],
    origin_BT: Tensor | None = None,
) -> dict[str, float]:
    """Return ``top1`` and ``r2`` of probes, each with its standard error over images (``_se``).

    Tokens were shown at ``shown_BT``; where they came from, ``origin_BT``, adds ``origin_top1``.
    """
    tokens_MD = tokens_BTD.flatten(0, 1).to(probes.classifier.device)
    places = probes.places(tokens_MD).cpu().view(shown_BT.shape)
    coordinates = probes.rows_and_columns(tokens_MD).cpu().view(*shown_BT.shape, 2)
    figures = mean_and_error("top1", (places == shown_BT).double().mean(dim=1))
    figures |= r_squared(coordinates, coordinates_of(shown_BT, grid))
    if origin_BT is not None:
        figures |= mean_and_error("origin_top1", (places == origin_BT).double().mean(dim=1))
    return figures


def r_squared(predicted_BTK: Tensor, targets_BTK: Tensor) -> dict[str, float]:
    """Return ``r2``, 1 − residual / total sum of squares over all K coordinates, and ``r2_se``.

    It is a ratio of sums over images, with the error of a ratio estimator (Cochran 1977, 6.4).
    """
    residual_B, total_B = _squares(predicted_BTK, targets_BTK)
    ratio = residual_B.sum() / total_B.sum()
    error = standard_error((residual_B - ratio * total_B) / total_B.mean())
    return {"r2": float(1 - ratio), "r2_se": float(error)}


def unexplained(predicted_BTK: Tensor, targets_BTK: Tensor) -> Estimate:
    """Return 1 − R² over images, and without each of them; see ``r_squared``."""
    return share(*_squares(predicted_BTK, targets_BTK))


def _squares(predicted_BTK: Tensor, targets_BTK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual and the total sum of squares (B,) of each image."""
    targets, predicted = targets_BTK.double(), predicted_BTK.double()
    residual_B = (targets - predicted).square().sum(dim=(1, 2))
    return residual_B, (targets - targets.mean(dim=(0, 1))).square().sum(dim=(1, 2))


def _with_one(features_MD: Tensor) -> Tensor:
    return F.pad(features_MD, (0, 1), value=1.0)
