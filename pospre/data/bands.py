"""A JPEG with restart markers → a shorter one, of some of its rows.

The markers are looked for in every image, so that is compiled: a few microseconds. Numba keeps the
compiled code until this file changes.
"""

from typing import Any

import numpy as np

from pospre.exact import compiled

_RESTART, _RESTARTS = np.uint8(0xD0), np.uint8(0xF8)  # 0xD0 to 0xD7
_MARK, _END = np.uint8(0xFF), 0xD9
_STRIDE = 64  # bytes looked at together


@compiled
def _find_markers(scan: np.ndarray, count: int) -> Any:
    """Return the places of the first restart markers; fewer where there are not so many."""
    places, found = np.empty(count, np.int64), 0
    at, one = np.uint64(0), np.uint64(1)
    last = np.uint64(max(len(scan) - 1, 0))
    while at < last and found < count:
        stop = min(at + np.uint64(_STRIDE), last)
        is_here = False
        if stop == at + np.uint64(_STRIDE):
            for place in range(at, at + np.uint64(_STRIDE)):  # without a branch: 64 at once
                is_here |= (scan[place] == _MARK) & ((scan[place + one] & _RESTARTS) == _RESTART)
        if is_here or stop == last:
            for place in range(at, stop):
                if scan[place] == _MARK and scan[place + one] & _RESTARTS == _RESTART:
                    if found < count:
                        places[found] = place
                    found += 1
        at = stop
    return places[: min(found, count)]


def cut_bands(data: np.ndarray, scan: int, first: int, last: int, num_bands: int) -> Any:
    """Return a JPEG of some bands, uint8 (N,); its header still says the old height.

    Args:
        data: a JPEG's bytes, uint8.
        scan: where the entropy-coded data begin.
        first: of the bands that stay; at least 1.
        last: first of the bands below that do not.
        num_bands: that the JPEG has.

    Returns:
        None where a marker is missing or has another number.
    """
    count = min(last, num_bands - 1)
    places = scan + _find_markers(data[scan:], count)
    numbers = _RESTART | np.arange(count, dtype=np.uint8) & 7
    if len(places) < count or (data[places + 1] != numbers).any():
        return None
    start = places[first - 1] + 2
    stop = len(data) if last == num_bands else places[last - 1] + 2
    cut = np.concatenate([data[:scan], data[start:stop]])
    inside = places[first:]
    cut[inside + (scan - start + 1)] = numbers[: len(inside)]
    if last < num_bands:
        cut[-1] = _END
    return cut
