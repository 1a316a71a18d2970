"""Similarities of two sets of features: unbiased CKA, Procrustes, neighbours, sums to fit from."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.model.comparison import half_squared_distance

NEIGHBOURS = 5
_SHRINKAGE = 1e-3  # of the mean variance: directions without data have no rotation


def cosine(own: Tensor, other: Tensor) -> Tensor:
    """Return the cosines of vectors in the last axis: exactly 1 if they are equal, 0 of a zero."""
    first, second = ((each != 0).any(-1).to(own.dtype) for each in (own, other))
    return (first + second) / 2 - half_squared_distance(own, other)


def unbiased_cka(own_MD: Tensor, other_MD: Tensor) -> float:
    """Return the linear CKA of features of the same images, by HSIC₁ (Song et al. 2012).

    About 0 for independent features whatever their width, 1 for equal ones, and 0 if those of one
    are all the same.
    """
    grams = []
    for features in (own_MD, other_MD):
        centred = features.double() - features.double().mean(0)
        grams.append((centred @ centred.T).fill_diagonal_(0))
    own, other = grams
    scale = math.prod(max(float(hsic(each, each)), 0.0) for each in grams) ** 0.5
    return min(1.0, max(-1.0, float(hsic(own, other)) / scale)) if scale else 0.0


def hsic(own_MM: Tensor, other_MM: Tensor) -> Tensor:
    """Return HSIC₁ of two Gram matrices with zeros on the diagonal, of four images or more."""
    count = len(own_MM)
    together = (own_MM * other_MM).sum()
    apart = own_MM.sum() * other_MM.sum() / ((count - 1) * (count - 2))
    crossed = (own_MM.sum(0) @ other_MM.sum(0)) * 2 / (count - 2)
    return (together + apart - crossed) / (count * (count - 3))


def rotation(own_DD: Tensor, cross_DD: Tensor) -> Tensor:
    """Return the rotation R that brings X nearest to Y, from XᵀX and XᵀY of centred features.

    A little of the identity keeps it from being arbitrary where there are no data.
    """
    shrinkage = _SHRINKAGE * own_DD.diagonal().mean()
    left, _, right = torch.linalg.svd(cross_DD + shrinkage * torch.eye(len(cross_DD)).to(cross_DD))
    return left @ right


class Sums:
    """Sums over features X and targets Y, from which maps between them are fitted.

    They are in float64 and of distances to the first rows' mean, so no features have to be kept.
    """

    def __init__(self) -> None:
        self.count = 0
        self._pivots: tuple[Tensor, Tensor] | None = None
        self._x: Tensor | float = 0.0
        self._y: Tensor | float = 0.0
        self._xx: Tensor | float = 0.0
        self._xy: Tensor | float = 0.0

    def add(self, x_MD: Tensor, y_MK: Tensor) -> None:
        """Add some rows."""
        x_MD, y_MK = x_MD.double(), y_MK.double()
        if self._pivots is None:
            self._pivots = x_MD.mean(0), y_MK.mean(0)
        x_MD, y_MK = x_MD - self._pivots[0], y_MK - self._pivots[1]
        self.count += len(x_MD)
        self._x = self._x + x_MD.sum(0)
        self._y = self._y + y_MK.sum(0)
        self._xx = self._xx + x_MD.T @ x_MD
        self._xy = self._xy + x_MD.T @ y_MK

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The means of X and Y."""
        assert self._pivots is not None
        x, y = self._pivots
        return x + self._x / self.count, y + self._y / self.count

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return the covariances of X, and of X with Y."""
        x, y = (torch.as_tensor(each) / self.count for each in (self._x, self._y))
        own, cross = (torch.as_tensor(each) / self.count for each in (self._xx, self._xy))
        return own - torch.outer(x, x), cross - torch.outer(x, y)

    def ridge(self) -> tuple[Tensor, Tensor]:
        """Return weights (D, K) and bias (K,) that predict Y, with a little ridge."""
        (own, cross), (x, y) = self.centred(), self.means
        own = own + _SHRINKAGE * own.diagonal().mean() * torch.eye(len(own)).to(own)
        weights = torch.linalg.solve(own, cross)
        return weights, y - x @ weights


def similarities(tokens_BND: Tensor) -> Tensor:
    """Return the cosines (B, N, N) between the tokens of each image."""
    directions = F.normalize(tokens_BND, dim=-1)
    return directions @ directions.mT


def kept(own_BNN: Tensor, start_BNN: Tensor) -> Tensor:
    """Return the share (B,) of the nearest neighbours in the start that are still nearest."""
    count = min(NEIGHBOURS, own_BNN.shape[1] - 1)
    nearest = []
    for similarity in (own_BNN, start_BNN):
        others = similarity.clone()
        others.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        places = others.topk(count, dim=-1).indices
        nearest.append(torch.zeros_like(others, dtype=torch.bool).scatter_(-1, places, True))
    both = (nearest[0] & nearest[1]).sum(-1) / count
    return both.mean(-1)
