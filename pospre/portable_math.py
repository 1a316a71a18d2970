"""Arithmetic with the same bits in numpy, torch and numba: what every draw and box is made of.

A function above the line below uses nothing but + − × ÷ on float64 and wrapping + × and bit
operations on int64. IEEE 754 and two's complement say what those give, so it is the same for a
number, an array, a tensor and in compiled code. Below are the compiled functions: they plan the
views of one image in a few microseconds, by the same functions.

All of it stands in one file because numba stores its compiled code until *this* file changes: in
``__pycache__``, else where it may write. It keeps Python's lock, for a microsecond or two. Without
``fastmath``, LLVM keeps every rounding step.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64: the bits of the golden ratio
NUM_TRIES = 10
DRAWS_PER_TRY = 4  # area, aspect ratio, left, top
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_UNIT = 2.0**-24
_TO_WHOLE = 2.0**52  # float64 has no fractions from here on
_HALVINGS = 5
_EXP_TERMS = tuple(1 / math.factorial(power) for power in range(12, -1, -1))


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
    """Take one more int64 word into keys."""
    return mix((words ^ word) + GOLDEN)


@register_jitable
def round_half_even(values: Any) -> Any:
    """Round float64 from 0 to 2**51 to whole numbers, halves to the even one, as ``round`` does."""
    return (values + _TO_WHOLE) - _TO_WHOLE


@register_jitable
def exp(values: Any) -> Any:
    """Return e to the power of float64 values; for |x| ≤ 8 within 2**-46 of it, relatively.

    The Taylor series of degree 12 at x/32, squared five times.
    """
    small = values * 0.5**_HALVINGS
    total = small * 0.0
    for term in _EXP_TERMS:
        total = total * small + term
    for _ in range(_HALVINGS):
        total = total * total
    return total


@register_jitable
def squared_sides(
    area: Any,
    area_draw: Any,
    aspect_draw: Any,
    scale: tuple[float, float],
    log_ratio: tuple[float, float],
) -> Any:
    """Return the squares of a random box's width and height, in an image of so many pixels."""
    part = area * (scale[0] + (scale[1] - scale[0]) * area_draw)
    aspect = exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * aspect_draw)
    return part * aspect, part / aspect


@register_jitable
def relative_place(start: Any, length: Any, place: Any, scaled: Any, size: Any) -> Any:
    """Return a place in a box scaled from ``length`` to ``scaled`` as a part of the whole size."""
    return (start + place * length / scaled) / size


# ------------------------------------------------------------------------------------ compiled


def compiled(function: Callable[..., Any], *, nogil: bool = False) -> Callable[..., Any]:
    """Compile a function and store the code where that can be done.

    Args:
        function: to be compiled.
        nogil: let go of Python's lock while it runs, which pays from some 10 µs on.
    """
    try:
        return njit(function, cache=True, nogil=nogil)
    except RuntimeError:  # nowhere to store it, as in a locked container: a second at each start
        return njit(function, nogil=nogil)


@compiled
def sample_key(start: int, epoch: int, index: int, view: int) -> Any:
    """Return the key of ``pospre.draws.sample_keys``; ``start`` is its ``start_word``."""
    return chain(chain(chain(mix(start), epoch), index), view)


@compiled
def uniform(key: int, number: int) -> Any:
    """Return the draw that is column ``number`` of ``pospre.draws.uniform``, as float64."""
    return shift_right(mix(key + (number + 1) * GOLDEN), 40) * _UNIT


@compiled
def _random_box(
    key: int,
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    log_ratio: tuple[float, float],
) -> Any:
    area = float(width) * float(height)
    for number in range(0, NUM_TRIES * DRAWS_PER_TRY, DRAWS_PER_TRY):
        squares = squared_sides(
            area, uniform(key, number), uniform(key, number + 1), scale, log_ratio
        )
        across = round_half_even(math.sqrt(squares[0]))
        down = round_half_even(math.sqrt(squares[1]))
        if 0 < across <= width and 0 < down <= height:
            left = int(uniform(key, number + 2) * (width - across + 1))
            top = int(uniform(key, number + 3) * (height - down + 1))
            return left, top, int(across), int(down)
    across = min(width, max(1, int(round_half_even(height * ratio[1]))))
    down = min(height, max(1, int(round_half_even(width / ratio[0]))))
    return (width - across) // 2, (height - down) // 2, across, down


@compiled
def random_boxes(
    start: int,
    epoch: int,
    index: int,
    views: tuple[int, int],
    image: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    log_ratio: tuple[float, float],
) -> Any:
    """Return ``views.boxes.random_boxes`` of one sample, int64 (V, 4), drawing as it goes.

    Args:
        start: ``start_word`` of the draws.
        epoch: of the draws.
        index: of the sample.
        views: number of the first view and how many there are.
        image: width and height.
        scale: range of the box's area.
        ratio: range of width / height.
        log_ratio: its logarithms.
    """
    boxes = np.empty((views[1], 4), np.int64)
    for view in range(views[1]):
        key = sample_key(start, epoch, index, views[0] + view)
        box = _random_box(key, image[0], image[1], scale, ratio, log_ratio)
        for column in range(4):
            boxes[view, column] = box[column]
    return boxes


@compiled
def random_windows(
    start: int,
    epoch: int,
    index: int,
    views: tuple[int, int],
    scaled: tuple[int, int],
    size: tuple[int, int],
    padding: int,
) -> Any:
    """Return ``pospre.data.views.boxes.random_windows`` of one sample, int64 (V, 4).

    Args:
        start: ``start_word`` of the draws.
        epoch: of the draws.
        index: of the sample.
        views: number of the first view and how many there are.
        scaled: width and height of the resized image.
        size: width and height of a window.
        padding: how far windows may reach over the edge.
    """
    windows = np.empty((views[1], 4), np.int64)
    for view in range(views[1]):
        key = sample_key(start, epoch, index, views[0] + view)
        for axis in range(2):
            room = scaled[axis] + 2 * padding - size[axis] + 1
            windows[view, axis] = int(uniform(key, axis) * room) - padding
            windows[view, 2 + axis] = size[axis]
    return windows


@compiled
def relative_boxes(
    boxes: np.ndarray, windows: np.ndarray | None, scaled: tuple[int, int], image: tuple[int, int]
) -> Any:
    """Return x0, y0, x1, y1 of windows of resized boxes as parts of the image, float32 (V, 4).

    Without windows, of all of the boxes.
    """
    places = np.empty((len(boxes), 4), np.float32)
    for view in range(len(boxes)):
        for axis in range(2):
            box, length = boxes[view, axis], boxes[view, 2 + axis]
            sides = scaled[axis], image[axis]
            first, last = 0, sides[0]
            if windows is not None:
                first, last = windows[view, axis], windows[view, axis] + windows[view, 2 + axis]
            places[view, axis] = relative_place(box, length, first, sides[0], sides[1])
            places[view, 2 + axis] = relative_place(box, length, last, sides[0], sides[1])
    return places


@compiled
def hull(boxes: np.ndarray) -> Any:
    """Return left, top, right and bottom of the smallest box around all boxes, int64 (V, 4)."""
    left, top = boxes[0, 0], boxes[0, 1]
    right, bottom = left + boxes[0, 2], top + boxes[0, 3]
    for view in range(1, len(boxes)):
        left, top = min(left, boxes[view, 0]), min(top, boxes[view, 1])
        right = max(right, boxes[view, 0] + boxes[view, 2])
        bottom = max(bottom, boxes[view, 1] + boxes[view, 3])
    return left, top, right, bottom
