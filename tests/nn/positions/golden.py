"""The setting of the golden numbers: a grid of 3×4, heads of 16 channels, and fixed queries."""

import torch
from torch import Tensor

from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme, TransformerDims, rotate

GRID = (3, 4)
DIMS = TransformerDims(dim=16, num_heads=1, depth=2, grid=GRID)
PLACES = Places(GRID)


def queries() -> Tensor:
    """Return ((37·i) mod 200)/100 − 1 for i = 0, 1, …: float64 (1, 1, 12, 16)."""
    return ((37 * torch.arange(12 * 16) % 200).double() / 100 - 1).view(1, 1, 12, 16)


def turned(scheme: Scheme, tokens: Tensor, layer: int = 0, *, interleaved: bool = False) -> Tensor:
    """Return tokens (B, heads, N, D) turned as in block ``layer``.

    Args:
        scheme: of the encoder.
        tokens: whose channels are in the order of published weights.
        layer: number of the block.
        interleaved: channels 2i and 2i + 1 are a pair there, not i and i + D/2.
    """
    rotation = [*scheme.layer_terms(PLACES)][layer].rotation
    assert rotation is not None
    if not interleaved:
        return rotate(tokens, rotation)
    half = tokens.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(half, rotation).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def checksum(tokens: Tensor) -> float:
    """Return Σ k·token_k / 1000 over all channels of all tokens, k from 1."""
    flat = tokens.double().flatten()
    return float((flat * torch.arange(1, len(flat) + 1)).sum() / 1000)


def check(found: Tensor, golden: str, *, places: int = 6) -> None:
    """Assert that numbers are those written, up to one unit of the last place, in float32."""
    wanted = torch.tensor([float(each) for each in golden.split()], dtype=torch.float64)
    torch.testing.assert_close(found.double().flatten(), wanted, rtol=3e-7, atol=1.5 * 0.1**places)
