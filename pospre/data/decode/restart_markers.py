"""Cropping a JPEG with restart markers to some of its rows and columns.

Every image is searched for markers, so this is compiled and takes a few microseconds. Numba caches
the compiled code until this file changes.
"""

from functools import partial
from typing import Any

import numpy as np

from pospre.portable_math import compiled

_RESTART, _RESTARTS = np.uint8(0xD0), np.uint8(0xF8)  # 0xD0 to 0xD7
_MARK, _END = np.uint8(0xFF), np.uint8(0xD9)
_STRIDE = 64  # bytes looked at together


@compiled
def _find_markers(scan: np.ndarray, count: int) -> Any:
    """Return the positions of the first ``count`` restart markers, or all if there are fewer."""
    positions, total = np.empty(count, np.int64), 0
    at, one = np.uint64(0), np.uint64(1)
    last = np.uint64(max(len(scan) - 1, 0))
    while at < last and total < count:
        stop = min(at + np.uint64(_STRIDE), last)
        is_here = False
        if stop == at + np.uint64(_STRIDE):
            for index in range(at, at + np.uint64(_STRIDE)):  # without a branch: 64 at once
                is_here |= (scan[index] == _MARK) & ((scan[index + one] & _RESTARTS) == _RESTART)
        if is_here or stop == last:
            for index in range(at, stop):
                if scan[index] == _MARK and scan[index + one] & _RESTARTS == _RESTART:
                    if total < count:
                        positions[total] = index
                    total += 1
        at = stop
    return positions[: min(total, count)]


@partial(compiled, nogil=True)
def _copy_intervals(
    data: np.ndarray,
    scan: int,
    window: tuple[int, int, int, int],
    grid: tuple[int, int],
    cut: np.ndarray,
) -> Any:
    """Write the smaller JPEG; return its length, or 0 if a marker is wrong."""
    left, top, right, bottom = window
    across, down = grid
    count = min((bottom - 1) * across + right, across * down - 1)
    positions = scan + _find_markers(data[scan:], count)
    if len(positions) < count:
        return 0
    for number in range(count):
        if data[positions[number] + 1] != _RESTART | np.uint8(number & 7):
            return 0
    cut[:scan] = data[:scan]
    to, written = scan, 0
    for row in range(top, bottom):
        first, last = row * across + left, row * across + right
        start = positions[first - 1] + 2 if first else scan
        stop = positions[last - 1] + 2 if last <= count else len(data)
        cut[to : to + stop - start] = data[start:stop]
        for number in range(first, min(last, count)):
            cut[to + positions[number] + 1 - start] = _RESTART | np.uint8(written & 7)
            written += 1
        to += stop - start
        if row == bottom - 1 and last <= count:
            cut[to - 1] = _END
    return to


def crop_intervals(
    data: np.ndarray, scan: int, window: tuple[int, int, int, int], grid: tuple[int, int]
) -> np.ndarray | None:
    """Return a JPEG with only some restart intervals, uint8 (N,); its header has the old size.

    ``scan`` is the offset of the entropy-coded data, ``window`` the left, top, right and bottom of
    the intervals to keep (right and bottom exclusive), ``grid`` their number across and down.
    Return None if a marker is missing or has another number.
    """
    cut = np.empty_like(data)
    length = _copy_intervals(data, scan, window, grid, cut)
    return cut[:length] if length else None
