"""int64 arithmetic with the same bits in numpy, torch and numba: the basis of every draw.

It has wrapping + and ×, bit operations, and compiled code for the draws of one sample's views.

Numba caches compiled code until its source file changes. Compiled code therefore only uses what is
in its own file. It holds Python's lock for a microsecond or two. Without ``fastmath``, LLVM keeps
every rounding step.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64: the bits of the golden ratio
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_UNIT = 2.0**-24


@register_jitable
def shift_right(words: Any, count: int) -> Any:
    """Shift int64 words right, filling with zeros (int64's own ``>>`` copies the sign bit)."""
    return (words >> count) & ((1 << (64 - count)) - 1)


@register_jitable
def mix(words: Any) -> Any:
    """Scramble int64 words (SplitMix64's finaliser); different words stay different."""
    words = (words ^ shift_right(words, 30)) * _MULTIPLIERS[0]
    words = (words ^ shift_right(words, 27)) * _MULTIPLIERS[1]
    return words ^ shift_right(words, 31)


@register_jitable
def chain(words: Any, word: Any) -> Any:
    """Mix one more int64 word into keys."""
    return mix((words ^ word) + GOLDEN)


def compiled(function: Callable[..., Any], *, nogil: bool = False) -> Callable[..., Any]:
    """Compile a function and cache the code if possible.

    Args:
        function: the function to compile.
        nogil: release Python's lock while it runs, worthwhile from about 10 µs.
    """
    try:
        return njit(function, cache=True, nogil=nogil)
    except RuntimeError:  # no place for the cache, as in a locked container: costs 1 s per start
        return njit(function, nogil=nogil)


@compiled
def view_draws(start: int, epoch: int, index: int, views: tuple[int, int], count: int) -> Any:
    """Return the draws of ``pospre.draws.uniform`` for some views of a sample.

    Args:
        start: ``pospre.draws.start_word`` of them.
        epoch: epoch of the draws.
        index: index of the sample.
        views: number of the first view, and the number of views (V).
        count: draws for each view.

    Returns:
        float64 (V, count).
    """
    values = np.empty((views[1], count))
    for view in range(views[1]):
        key = chain(chain(chain(mix(start), epoch), index), views[0] + view)
        for number in range(count):
            values[view, number] = shift_right(mix(key + (number + 1) * GOLDEN), 40) * _UNIT
    return values
