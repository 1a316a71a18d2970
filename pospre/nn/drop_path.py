"""Stochastic depth and dropout, drawn per sample: a resumed run repeats the same draws."""

import torch
from torch import Tensor

from pospre import draws
from pospre.portable_math import chain

_DROPOUT = draws.start_word(0, "dropout")
_LEVELS, _DRAWS_PER_WORD = 1 << 16, 4


def residual_factors(
    keys_B: Tensor | None, rate: float, depth: int, *, uniform: bool = False
) -> list[Tensor | None]:
    """Return the factors (B, 2) of each block's two branches: 0 or 1/(1 − the block's rate).

    ``keys_B`` are int64 draw keys of the samples; None: nothing is dropped. The rate grows linearly
    from 0 in the first block to ``rate`` in the last (Huang et al. 2016), or is the same in all
    blocks if ``uniform`` (DINOv2).
    """
    if keys_B is None or not rate:
        return [None] * depth
    draw = draws.uniform(keys_B, 2 * depth).unflatten(1, (depth, 2))
    shares = [1.0 if uniform else block / max(depth - 1, 1) for block in range(depth)]
    rates = [rate * share for share in shares]
    return [(draw[:, i] >= dropped) / (1 - dropped) for i, dropped in enumerate(rates)]


def dropout_keys(keys_B: Tensor | None, number: int) -> Tensor | None:
    """Return dropout's draw keys in block ``number`` (from 1; 0 is the position embedding)."""
    return None if keys_B is None else chain(chain(keys_B, _DROPOUT), number)


def dropout(tokens: Tensor, keys_B: Tensor | None, rate: float, place: int) -> Tensor:
    """Set elements of (B, …) to 0 at the rate, and scale the others up (Srivastava et al. 2014).

    The rate, in [0, 1), is rounded to 2**-16. ``place`` numbers the dropouts with the same keys.
    With keys None nothing is dropped.
    """
    if keys_B is None or not rate:
        return tokens
    count = tokens[0].numel()
    words = draws.bits(chain(keys_B, place), -(-count // _DRAWS_PER_WORD))
    levels = min(round(rate * _LEVELS), _LEVELS - 1)
    # a word holds four draws, as int16 from −2**15 on
    kept = words.view(torch.int16)[:, :count] >= levels - _LEVELS // 2
    return tokens * kept.view_as(tokens) * (_LEVELS / (_LEVELS - levels))
