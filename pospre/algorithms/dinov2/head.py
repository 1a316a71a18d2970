"""The projection head of DINO, iBOT and DINOv2: a small MLP, then cosines with K prototypes."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre.nn.initialisation import init_trunc_normal


class Prototypes(nn.Module):
    """A linear map without bias whose rows have length 1 (weight normalisation with g = 1).

    Args:
        dim: width of the input.
        num_prototypes: K.
        train_norm: learn the rows' lengths g too, from 1, as DINOv2's code does.
    """

    def __init__(self, dim: int, num_prototypes: int, *, train_norm: bool = False) -> None:
        super().__init__()
        bound = dim**-0.5  # PyTorch's own initialisation of a Linear
        self.weight = nn.Parameter(torch.empty(num_prototypes, dim).uniform_(-bound, bound))
        self.scale = nn.Parameter(torch.ones(num_prototypes, 1)) if train_norm else None

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (..., K) of features (..., dim)."""
        weight = F.normalize(self.weight, dim=1)
        return F.linear(features, weight if self.scale is None else weight * self.scale)


class PrototypeHead(nn.Module):
    """MLP with GELU, L2 normalisation, prototypes; shared by class and patch tokens.

    Args:
        dim: width of the tokens.
        num_prototypes: K, the number of logits.
        hidden: width of the hidden layers.
        bottleneck: width in which cosines are taken.
        layers: of the MLP; 1 is a single Linear.
        train_norm: see ``Prototypes``.
    """

    def __init__(
        self,
        dim: int,
        num_prototypes: int,
        *,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        train_norm: bool = False,
    ) -> None:
        super().__init__()
        widths = [dim, *[hidden] * (layers - 1), bottleneck]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            parts += [nn.Linear(before, after), nn.GELU()]
        self.mlp = nn.Sequential(*parts[:-1])
        init_trunc_normal(self.mlp)
        self.last = Prototypes(bottleneck, num_prototypes, train_norm=train_norm)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (..., K) of tokens (..., D)."""
        # autocast would let a norm of half precision through, where 1e-12 is zero
        return self.last(F.normalize(self.mlp(tokens).float(), dim=-1, eps=1e-12))
