"""The objects of rendered scenes: each a coverage mask and a shading over a pixel grid.

A shape is a function of local coordinates: ``x`` from -1 (left) to 1 (right), ``y`` from 0 (its
foot) to 2 (its top), both float32 (H, W), and the width of a pixel in the same units. It returns
coverage in [0, 1] with an antialiased edge, and brightness around 1; both float32 (H, W).
"""

from collections.abc import Callable

import numpy as np
from numpy import ndarray

Shape = Callable[[ndarray, ndarray, float], tuple[ndarray, ndarray]]


def _inside(distance: ndarray, pixel: float) -> ndarray:
    """Turn a signed distance (negative inside) into coverage with an edge one pixel wide."""
    return np.clip(0.5 - distance / pixel, 0, 1)


def _ball(x: ndarray, y: ndarray, pixel: float) -> tuple[ndarray, ndarray]:
    height = np.sqrt(np.clip(1 - x**2 - (y - 1) ** 2, 0, 1))
    light = -0.45 * x + 0.55 * (y - 1) + 0.7 * height
    shine = np.clip(light - 0.85, 0, 1) * 2.5
    return _inside(np.hypot(x, y - 1) - 1, pixel), 0.45 + 0.65 * np.clip(light, 0, 1) + shine


def _box(x: ndarray, y: ndarray, pixel: float) -> tuple[ndarray, ndarray]:
    """A cube seen from a little above and from the right: front, side and top."""
    front = np.maximum(np.abs(x + 0.25) - 0.72, np.maximum(-y, y - 1.45))
    lean = np.clip(x - 0.47, 0, 0.5) * 0.9
    side = np.maximum(np.abs(x - 0.72) - 0.25, np.maximum(lean - y, y - 1.45 - lean))
    slide = (y - 1.45) / 0.9
    top = np.maximum(np.abs(x + 0.25 - slide) - 0.72, np.maximum(1.45 - y, y - 1.9))
    shade = np.where(top < np.minimum(front, side), 1.3, np.where(side < front, 0.6, 0.95))
    return _inside(np.minimum(np.minimum(front, side), top), pixel), shade


def _cone(x: ndarray, y: ndarray, pixel: float) -> tuple[ndarray, ndarray]:
    half_width = np.clip((2 - y) / 2, 0.01, 1)
    curve = 0.18 * (np.sqrt(np.clip(1 - x**2, 0, 1)) - 1)  # the round foot
    slope = (np.abs(x) - half_width) * 0.9
    distance = np.maximum(np.maximum(slope, y - 2), -y - curve - 0.18)
    return _inside(distance, pixel), 0.95 - 0.5 * np.clip(x / half_width, -1, 1)


def _cylinder(x: ndarray, y: ndarray, pixel: float) -> tuple[ndarray, ndarray]:
    width = 0.62
    bulge = 0.16 * np.sqrt(np.clip(1 - (x / width) ** 2, 0, 1))
    body = np.maximum(np.abs(x) - width, np.maximum(0.16 - bulge - y, y - 1.8))
    lid = (np.hypot(x / width, (y - 1.8) / 0.16) - 1) * 0.16
    shade = np.where(lid < 0, 1.3, 0.9 - 0.5 * x / width)
    return _inside(np.minimum(body, lid), pixel), shade


def _tree(x: ndarray, y: ndarray, pixel: float) -> tuple[ndarray, ndarray]:
    trunk = np.maximum(np.abs(x) - 0.13, np.maximum(-y, y - 1))
    crowns = [
        np.hypot(x - at_x, y - at_y) - radius
        for at_x, at_y, radius in ((0, 1.45, 0.55), (-0.45, 1.05, 0.42), (0.45, 1.1, 0.45))
    ]
    crown = np.minimum(np.minimum(crowns[0], crowns[1]), crowns[2])
    leaves = 0.95 + 0.2 * np.sin(9 * x + 3 * y) * np.sin(11 * y - 2 * x) - 0.35 * x
    return _inside(np.minimum(trunk, crown), pixel), np.where(crown < 0, leaves, 0.35)


def _ring(x: ndarray, y: ndarray, pixel: float) -> tuple[ndarray, ndarray]:
    radius = np.hypot(x, y - 1)
    tube = (radius - 0.7) / 0.3
    light = np.sqrt(np.clip(1 - tube**2, 0, 1)) + 0.3 * (y - 1) - 0.2 * x
    return _inside(np.abs(radius - 0.7) - 0.3, pixel), 0.5 + 0.6 * light


SHAPES: dict[str, Shape] = {
    "ball": _ball,
    "box": _box,
    "cone": _cone,
    "cylinder": _cylinder,
    "ring": _ring,
    "tree": _tree,
}
