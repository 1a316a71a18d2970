"""Weight initialisations: MAE, DropPos and LUT share one; I-JEPA, DINOv2 and DeiT the other."""

import torch
from torch import nn


def init_weights(module: nn.Module) -> None:
    """Initialise Linear (Xavier-uniform, zero bias) and LayerNorm (ones, zeros) below ``module``.

    A convolution's bias keeps PyTorch's own default, as in the published code.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)


def token_parameter(dim: int) -> nn.Parameter:
    """Return a learned (1, 1, dim) token drawn from N(0, 0.02²)."""
    return nn.Parameter(torch.empty(1, 1, dim).normal_(std=0.02))


def init_trunc_normal(module: nn.Module) -> None:
    """Initialise Linear and Conv2d below ``module`` from N(0, 0.02²) cut at ±2, biases with 0."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
