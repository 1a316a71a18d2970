"""Counter-based random draws: the same bits in numpy and torch, on any device, in any order.

A draw is a pure function of (seed, epoch, sample index, view, purpose) and of its own counter. It
does not depend on rank, worker, batch size or storage format. The generator is the SplitMix64
finaliser (Steele, Lea and Flood 2014) applied to a chain of these five words.

Exactly, with all words int64 and all sums and products modulo 2**64, mix the finaliser and
G = 0x9E3779B97F4A7C15 (``pospre.portable_math`` has both; numba runs the same functions)::

    purpose = the first 8 bytes, little-endian, of BLAKE2b with an 8-byte digest of the name
    start   = seed · G + purpose
    key     = mix(start)
    key     = mix((key ^ word) + G)   for word in (epoch, index, view)
    bits    = mix(key + c · G)        for the counter c = 1, 2, 3…
    uniform = (bits >> 40, with zeros shifted in) / 2**24
"""

import hashlib
import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pospre.portable_math import GOLDEN, chain, mix, shift_right

Keys = TypeVar("Keys", np.ndarray, Tensor)

_MASK64 = (1 << 64) - 1
_ORDER_BLOCK = 1 << 20


def _signed(word: int) -> int:
    """Return the int64 with the bits of ``word`` modulo 2**64."""
    word &= _MASK64
    return word - (1 << 64) if word >> 63 else word


def _purpose_word(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


# torch.compile takes the word as a constant, as it cannot look into hashlib. The decorator
# torch.compiler.assume_constant_result sets the same, but imports the compiler: 2 s in each process
_purpose_word._dynamo_marked_constant = True  # type: ignore[attr-defined]


def start_word(seed: int, purpose: str) -> int:
    """Return the word that all keys of a seed and a purpose start from."""
    return _signed(seed * GOLDEN + _purpose_word(purpose))


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
    zero = index * 0
    words: Any = mix(zero + start_word(seed, purpose))
    for word in (epoch, index, view):
        if isinstance(word, int):
            word = zero + word
        words = chain(words, word)
    return words


def bits(keys: Keys, count: int) -> Keys:
    """Return ``count`` int64 words of random bits per key, shape ``keys.shape + (count,)``."""
    if isinstance(keys, Tensor):
        multiples = _opaque if torch.compiler.is_compiling() else _multiples
        return mix(keys.unsqueeze(-1) + multiples(keys, count))
    return mix(keys[..., None] + np.arange(1, count + 1, dtype=np.int64) * np.int64(GOLDEN))


def _multiples(keys: Tensor, count: int) -> Tensor:
    """Return c · G for the counters c = 1…count, on the device of ``keys``."""
    return torch.arange(1, count + 1, device=keys.device) * GOLDEN


# On GPUs, torch.compile turns arange into a 32-bit index, which cannot hold G (torch 2.11: "Scalar
# … is out of range for type int32"). It treats an operator as opaque
_opaque = torch.library.custom_op("pospre::multiples", _multiples, mutates_args=())
_opaque.register_fake(lambda keys, count: keys.new_empty(count))


def uniform(keys: Keys, count: int) -> Keys:
    """Return float32 draws in [0, 1), multiples of 2**-24, shape ``keys.shape + (count,)``."""
    words: Keys = shift_right(bits(keys, count), 40)
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
        radius = (-2 * ((shift_right(words, 32).float() + 0.5) * scale).log()).sqrt()
        angle = (words & 0xFFFFFFFF).float() * (2 * math.pi * scale)
        pair = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
        return pair.flatten(-2)[..., :count]
    high, low = shift_right(words, 32).astype(np.float32), words & 0xFFFFFFFF
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
    keys = np.empty(size, np.int64)
    for start in range(0, size, _ORDER_BLOCK):  # little memory besides the result
        index = np.arange(start, min(start + _ORDER_BLOCK, size), dtype=np.int64)
        keys[start : start + _ORDER_BLOCK] = sample_keys(seed, epoch, index, 0, "shuffle")
    return np.argsort(keys)  # keys are unique, so any sorting algorithm gives the same
