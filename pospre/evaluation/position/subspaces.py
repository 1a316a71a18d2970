"""Subspaces of tokens that hold position, others of the same rank, and tokens without them."""

from bisect import bisect_left
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre import draws
from pospre.errors import UserError
from pospre.evaluation.layers import layer_tokens
from pospre.evaluation.position.probes import coordinates_of, fit_whitening, ridge
from pospre.evaluation.position.settings import Blank, PositionRemoval
from pospre.model.model import PretrainModel
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.scheme import Scheme

_SHOWN = 1e-4
"""Least largest singular value of a blank image's tokens, in units of √N; rounding gives 1e-7."""
_NO_POSITIONS = "Use by=regression or by=covariance, which find positions in images."


class Removed(nn.Module):
    """Projects tokens onto the orthogonal complement of a basis (D, K), around their mean (D,).

    Without a mean, tokens have length 1 before and after: x̂ − U Uᵀ x̂ of x̂ = x / ‖x‖ (INSID3).
    """

    def __init__(self, basis_DK: Tensor, mean_D: Tensor | None) -> None:
        super().__init__()
        self.basis_DK = nn.Buffer(basis_DK)
        self.mean_D = None if mean_D is None else nn.Buffer(mean_D)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens (…, D) without their component in the basis."""
        basis_DK = self.basis_DK.to(tokens)
        if self.mean_D is None:
            unit = F.normalize(tokens, dim=-1)
            return F.normalize(unit - unit @ basis_DK @ basis_DK.T, dim=-1)
        return tokens - (tokens - self.mean_D.to(tokens)) @ basis_DK @ basis_DK.T


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
        left_MD = Removed(basis, tokens_MD.mean(0))(tokens_MD)
        whiten = fit_whitening(left_MD)
        plane = whiten.matrix @ ridge(whiten(left_MD), targets, weight_decay)[:-1]
        plane = plane - basis @ (basis.T @ plane)
        plane = plane / plane.norm(dim=0).clamp_min(1e-12)  # a sequence has no second direction
        basis = torch.linalg.qr(torch.cat([basis, plane], dim=1)).Q
    return basis


def blank_image(model: PretrainModel, blank: Blank) -> Tensor:
    """Return a normalised image (1, C, H, W) of one colour."""
    encoder, mean = model.encoder, model.augment.mean
    levels = torch.zeros(1, encoder.channels, *encoder.image_size, device=mean.device)
    return model.augment.normalise(levels) if blank == "black" else levels


def blank_tokens(model: PretrainModel, blank: Blank) -> Tensor:
    """Return the last layer's patch tokens (N, D) of an image without content."""
    encoder = model.encoder
    tokens_1TD = layer_tokens(model, blank_image(model, blank), [encoder.depth])[0]
    return tokens_1TD[0, encoder.num_prefix_tokens :].float().cpu()


def blank_directions(tokens_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular vectors (D, R) of a blank image's tokens in feature space, and values.

    Tokens have length 1 and are centred over the image; values that are rounding are left out.
    """
    unit_ND = F.normalize(tokens_ND.double(), dim=1)
    _, values_R, vectors_RD = torch.linalg.svd(unit_ND - unit_ND.mean(0), full_matrices=False)
    least = max(tokens_ND.shape) * torch.finfo(torch.float32).eps * values_R[0]
    rank = int((values_R > least).sum())
    return vectors_RD[:rank].T.to(tokens_ND.dtype), values_R[:rank]


def check_blank(encoder: PatchEncoder, planes: int | None) -> None:
    """Raise a ``UserError`` if a blank image cannot show positions, or not so many directions."""
    positions = encoder.positions
    if not positions.can_forget:
        raise UserError(
            f"by=blank, but encoder.positions = {positions.name}: a blank image is empty. "
            + _NO_POSITIONS
        )
    if not encoder.num_prefix_tokens and type(positions).embed is Scheme.embed:
        raise UserError(
            f"by=blank, but encoder.positions = {positions.name} only relates tokens to each "
            "other, and the encoder has no class token or registers, so all patches of a blank "
            f"image are equal. {_NO_POSITIONS}"
        )
    if planes is not None:
        _check_count(planes, min(encoder.num_patches - 2, encoder.embed_dim // 2))


def shown_by_blank(model: PretrainModel, settings: PositionRemoval) -> tuple[Tensor, Tensor]:
    """Return the directions of a blank image that may be removed, and all its singular values.

    They are fewer than it has, and at most D/2.

    Raises:
        UserError: its tokens are equal, or span too little.
    """
    encoder, planes = model.encoder, settings.planes
    check_blank(encoder, planes)
    directions_DR, values_R = blank_directions(blank_tokens(model, settings.blank))
    count, name = encoder.num_patches, encoder.positions.name
    largest = float(values_R[0]) if len(values_R) else 0.0
    if largest < _SHOWN * count**0.5:
        raise UserError(
            f"by=blank, but a blank image shows no positions: the largest singular value of its "
            f"{count} tokens is {largest:.1g}, below {_SHOWN:g}·√{count} (encoder.positions = "
            f"{name}). {_NO_POSITIONS}"
        )
    most = min(len(values_R) - 1, len(directions_DR) // 2)
    if planes is not None or most < 1:
        _check_count(planes or 1, most)
    return directions_DR[:, :most], values_R


def _check_count(planes: int, most: int) -> None:
    if planes > most:
        raise UserError(
            f"planes={planes}, but at most {max(most, 0)} directions may be removed: fewer than a "
            "blank image has, and at most half of the token's; with more, content goes too."
        )


def random_directions(dim: int, count: int, seed: int) -> Tensor:
    """Return an orthonormal basis (dim, count) of a uniformly random subspace."""
    keys = draws.sample_keys(seed, 0, torch.arange(count), 0, "position_removal/random")
    return torch.linalg.qr(draws.normal(keys, dim).T.double()).Q.float()


def principal_directions(tokens_MD: Tensor, count: int) -> Tensor:
    """Return the first principal directions (D, count) of tokens."""
    centred = (tokens_MD - tokens_MD.mean(0)).double()
    return torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :count].float()


def variance_in(tokens_MD: Tensor, basis_DK: Tensor) -> float:
    """Return the share of the tokens' variance in an orthonormal basis."""
    centred = tokens_MD - tokens_MD.mean(0)
    return float((centred @ basis_DK).square().sum() / centred.square().sum())


def angles_between(first_DK: Tensor, second_DK: Tensor) -> Tensor:
    """Return the principal angles (K,) of two subspaces in degrees, smallest first."""
    cosines_K = torch.linalg.svdvals(first_DK.double().T @ second_DK.double())
    return cosines_K.clamp(0, 1).arccos().rad2deg()


def fewest(most: int, is_enough: Callable[[int], bool]) -> int:
    """Return the smallest count up to ``most`` that is enough; ``most`` if none below it is."""
    return 1 + bisect_left(range(1, most), True, key=is_enough)
