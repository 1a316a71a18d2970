"""Stochastic depth that is drawn per sample, so that a resumed run drops the same branches."""

from torch import Tensor

from pospre import draws


def residual_factors(
    keys_B: Tensor | None, rate: float, depth: int, *, uniform: bool = False
) -> list[Tensor | None]:
    """Return the factors (B, 2) of each block's two branches: 0, or 1/(1 − rate of the block).

    Args:
        keys_B: int64 draw keys of the samples; None drops nothing.
        rate: of the last block, in [0, 1).
        depth: number of blocks.
        uniform: one rate for all blocks (DINOv2), instead of one that grows linearly from 0 in the
            first (Huang et al. 2016).
    """
    if keys_B is None or not rate:
        return [None] * depth
    draw = draws.uniform(keys_B, 2 * depth).unflatten(1, (depth, 2))
    shares = [1.0 if uniform else block / max(depth - 1, 1) for block in range(depth)]
    rates = [rate * share for share in shares]
    return [(draw[:, i] >= dropped) / (1 - dropped) for i, dropped in enumerate(rates)]
