"""Counter-based random draws: the same bits in numpy and torch, on any device, in any order.

A draw is a pure function of (seed, epoch, sample index, view, purpose) and of its own counter. The
rank, the worker, the batch size and the storage format never enter. The generator is the
SplitMix64 finaliser (Steele, Lea and Flood 2014) applied to a chain of those five words.
"""

import hashlib
import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Keys = TypeVar("Keys", np.ndarray, Tensor)

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def _signed(word: int) -> int:
    """Return the int64 with the bits of ``word`` modulo 2**64."""
    word &= _MASK64
    return word - (1 << 64) if word >> 63 else word


_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shift_right(words: Keys, count: int) -> Keys:
    """Shift int64 words right, filling with zeros (int64's own ``>>`` copies the sign bit)."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix(words: Keys) -> Keys:
    """Scramble int64 words; a bijection, so different words stay different."""
    words = (words ^ _shift_right(words, 30)) * _MULTIPLIERS[0]
    words = (words ^ _shift_right(words, 27)) * _MULTIPLIERS[1]
    return words ^ _shift_right(words, 31)


@torch.compiler.assume_constant_result  # torch.compile cannot look into hashlib
def _purpose_word(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


def sample_keys(seed: int, epoch: Keys | int, index: Keys, view: Keys | int, purpose: str) -> Keys:
    """Return one key per sample.

    Args:
        seed: the run's seed.
        epoch: an epoch per sample (same shape as ``index``), or one for all.
        index: int64 sample indices in the data set, numpy or torch, any shape.
        view: number of the view within the sample; or several, of a shape that broadcasts with
            ``index``'s, for keys of the common shape.
        purpose: what the draw is for (``"crop"``, ``"mae/mask"``…); purposes are independent.

    Returns:
        int64 keys of the shape (see ``view``), library and device of ``index``.
    """
    start = _signed(seed * _GOLDEN + _purpose_word(purpose))
    zero = index * 0
    words: Any = _mix(zero + start)
    for word in (epoch, index, view):
        if isinstance(word, int):
            word = zero + word
        words = _mix((words ^ word) + _signed(_GOLDEN))
    return words


def bits(keys: Keys, count: int) -> Keys:
    """Return ``count`` int64 words of random bits per key, shape ``keys.shape + (count,)``."""
    counters = np.arange(1, count + 1, dtype=np.int64) * np.int64(_signed(_GOLDEN))
    if isinstance(keys, Tensor):
        return _mix(keys.unsqueeze(-1) + torch.from_numpy(counters).to(keys.device))
    return _mix(keys[..., None] + counters)


def uniform(keys: Keys, count: int) -> Keys:
    """Return float32 draws in [0, 1), multiples of 2**-24, shape ``keys.shape + (count,)``."""
    words = _shift_right(bits(keys, count), 40)
    if isinstance(words, Tensor):
        return words.to(torch.float32) * 2.0**-24
    return words.astype(np.float32) * np.float32(2.0**-24)


def normal(keys: Keys, count: int) -> Keys:
    """Return float32 draws from N(0, 1), shape ``keys.shape + (count,)`` (Box and Muller 1958).

    Each word of bits gives two of them. numpy and torch agree to rounding, not to the bit.
    """
    words = bits(keys, (count + 1) // 2)
    scale = 2.0**-32
    if isinstance(words, Tensor):
        radius = (-2 * ((_shift_right(words, 32).float() + 0.5) * scale).log()).sqrt()
        angle = (words & 0xFFFFFFFF).float() * (2 * math.pi * scale)
        pair = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
        return pair.flatten(-2)[..., :count]
    high, low = _shift_right(words, 32).astype(np.float32), words & 0xFFFFFFFF
    radii = np.sqrt(-2 * np.log((high + np.float32(0.5)) * np.float32(scale)))
    angles = low.astype(np.float32) * np.float32(2 * math.pi * scale)
    waves = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=-1)
    return waves.reshape(*keys.shape, -1)[..., :count]


def permutation(keys: Keys, count: int) -> Keys:
    """Return a random permutation of ``range(count)`` per key, int64 ``keys.shape + (count,)``."""
    words = bits(keys, count)
    if isinstance(words, Tensor):
        return torch.argsort(words, dim=-1, stable=True)
    return np.argsort(words, axis=-1, kind="stable")


def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the order in which an epoch visits the samples: int64 (size,), for all ranks."""
    keys = sample_keys(seed, epoch, np.arange(size, dtype=np.int64), 0, "shuffle")
    return np.argsort(keys, kind="stable")
