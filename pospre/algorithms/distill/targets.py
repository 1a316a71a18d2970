"""What ``distill`` does to features before it compares them; fitted once, to the reference's.

Standardised features have variance 1: all channels together (``spread``), or each of them after a
rotation (PHI-S, Ranzinger et al. 2024, arXiv 2410.01680). Whitening each channel alone would blow
up those that hardly vary. Debiased ones lack the directions in which the mean features of two
places differ.
"""

import math

import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.model.objective import Sampled

MOST_DIRECTIONS = 32
_LARGEST_R2 = 0.05  # of a patch's row and column, read linearly from what is left
_RIDGE = 1e-4  # of the mean variance


def spread(patches_MD: Tensor) -> Tensor:
    """Return φ, the root of the mean variance of a channel."""
    return patches_MD.double().var(0).mean().sqrt()


def equalising_turn(patches_MD: Tensor) -> Tensor:
    """Return a rotation (D, D) after which, as ``x @ turn``, all channels vary alike.

    ``UserError`` if no Hadamard matrix of the width is known here.
    """
    axes = torch.linalg.eigh(patches_MD.double().T.cov()).eigenvectors
    return axes @ hadamard(len(axes)).T / math.sqrt(len(axes))


def hadamard(size: int) -> Tensor:
    """Return a float64 matrix of ±1 with orthogonal rows, by Sylvester and Paley.

    ``UserError`` unless the size is a power of two, times 1, 12 or 20.
    """
    core = next((each for each in (1, 12, 20) if _is_power_of_two(size / each)), None)
    if core is None:
        raise UserError(
            f"distill.standardise = phi_s needs a Hadamard matrix of the reference's width {size}, "
            "which is known here for 2^n, 12·2^n and 20·2^n. Use distill.standardise: isotropic."
        )
    matrix = torch.ones(1, 1, dtype=torch.float64) if core == 1 else _paley(core - 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _is_power_of_two(number: float) -> bool:
    return number >= 1 and number.is_integer() and int(number).bit_count() == 1


def _paley(prime: int) -> Tensor:
    """Return the Hadamard matrix of size prime + 1, for a prime that is 3 modulo 4."""
    squares = {number * number % prime for number in range(1, prime)}
    sign = torch.tensor([0.0] + [1.0 if each in squares else -1.0 for each in range(1, prime)])
    number = torch.arange(prime)
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 1:] = sign[(number[:, None] - number) % prime]
    matrix[1:, 0] = -1
    matrix.diagonal().fill_(1)
    return matrix


def place_directions(sampled: Sampled) -> Tensor:
    """Return an orthonormal basis (D, K) of what differs between the mean features of places.

    K is the smallest number without which a linear map, fitted to one half of the views, reads row
    and column of the other half's patches with R² < 0.05. ``UserError`` if there is none up to 32.
    """
    features = (sampled.patches - sampled.patches.mean(0)).double()
    places, count = sampled.places, sampled.grid[0] * sampled.grid[1]
    shares = places.bincount(minlength=count).clamp_min(1).unsqueeze(1)
    means = features.new_zeros(count, features.shape[1]).index_add(0, places, features) / shares
    basis = torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh.T
    cells = torch.stack([places // sampled.grid[1], places % sampled.grid[1]], 1).double()
    most = min(MOST_DIRECTIONS, basis.shape[1])
    for number in range(most + 1):
        left = features - features @ basis[:, :number] @ basis[:, :number].T
        if (r2 := _r_squared(left, cells)) < _LARGEST_R2:
            return basis[:, :number]
    raise UserError(
        f"distill.target = debiased: places can still be read (R² {r2:.2f}) without {most} "
        "directions of the reference's features. Use distill.target: raw."
    )


def _r_squared(features_MD: Tensor, place_M2: Tensor) -> float:
    """Return R² in the second half of the rows, by a map from the first half."""
    half = len(features_MD) // 2
    known, wanted = features_MD[:half], place_M2[:half]
    mean_D, mean_2 = known.mean(0), wanted.mean(0)
    gram = (known - mean_D).T @ (known - mean_D)
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean().clamp_min(1e-12))
    weights = torch.linalg.solve(gram, (known - mean_D).T @ (wanted - mean_2))
    asked, true = features_MD[half:], place_M2[half:]
    residual = (true - mean_2 - (asked - mean_D) @ weights).square().sum()
    return 1 - float(residual / (true - true.mean(0)).square().sum())
