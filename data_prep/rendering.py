"""Draws a scene: sky, ground in perspective, and objects on it, with exact labels.

A shape is a function of local coordinates: ``x`` from -1 (left) to 1 (right), ``y`` from 0 (its
foot) to 2 (its top), both float32 (H, W), and the width of a pixel in the same units. It returns
coverage in [0, 1] with an antialiased edge, and brightness around 1; both float32 (H, W).
"""

import colorsys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray
from PIL import Image

from pospre import draws

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


CLASSES = tuple(sorted(SHAPES))

# Colours (R, G, B in [0, 1]): the sky's top, the horizon, two colours of the ground.
KINDS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "meadow": ((0.25, 0.5, 0.9), (0.8, 0.9, 1.0), (0.25, 0.5, 0.15), (0.4, 0.65, 0.2)),
    "desert": ((0.2, 0.45, 0.85), (0.95, 0.9, 0.75), (0.75, 0.6, 0.35), (0.9, 0.75, 0.5)),
    "snow": ((0.45, 0.55, 0.7), (0.85, 0.88, 0.92), (0.8, 0.85, 0.92), (0.95, 0.97, 1.0)),
    "dusk": ((0.12, 0.1, 0.3), (0.95, 0.5, 0.3), (0.2, 0.15, 0.2), (0.35, 0.25, 0.25)),
    "plaza": ((0.5, 0.65, 0.8), (0.85, 0.85, 0.85), (0.35, 0.35, 0.38), (0.65, 0.65, 0.62)),
}

MAX_OBJECTS = 6
_NUM_TEXTURE = 256  # draws of a 16 x 16 noise grid
_CAMERA_HEIGHT = 1.0  # metres
_FOCAL = 1.0  # in picture widths
_NEAREST, _FARTHEST = 2.6, 16.0  # metres
_MAIN_FARTHEST = 4.2  # the main object is near, so that it dominates


@dataclass(frozen=True)
class SceneObject:
    """An object: position and height in metres, speed in metres per frame."""

    name: str
    colour: tuple[float, float, float]
    distance: float
    offset: float
    height: float
    velocity: tuple[float, float]

    def at(self, frame: int) -> "SceneObject":
        """Return the object at its position in a frame."""
        distance = float(np.clip(self.distance + self.velocity[1] * frame, _NEAREST, _FARTHEST))
        offset = self.offset + self.velocity[0] * frame
        return replace(self, distance=distance, offset=offset)


@dataclass(frozen=True)
class Scene:
    """A scene; only the objects' positions differ between frames."""

    kind: str
    horizon: float
    light: float
    texture_phase: tuple[float, float]
    noise: ndarray
    objects: tuple[SceneObject, ...]


def draw_scene(seed: int, number: int, split: str) -> Scene:
    """Return scene ``number`` of a split: a pure function of the three arguments."""
    index = np.array([number], dtype=np.int64)
    key = draws.sample_keys(seed, 0, index, 0, f"scenes/{split}")
    u = [float(value) for value in draws.uniform(key, 8)[0]]
    noise_key = draws.sample_keys(seed, 0, index, 0, f"scenes/{split}/noise")
    noise = draws.uniform(noise_key, 2 * _NUM_TEXTURE)[0].reshape(2, 16, 16)
    num_objects = 1 + int(u[0] * MAX_OBJECTS)
    objects = [_draw_object(seed, number, split, view) for view in range(num_objects)]
    return Scene(
        kind=sorted(KINDS)[int(u[1] * len(KINDS))],
        horizon=0.38 + 0.14 * u[2],
        light=0.85 + 0.25 * u[3],
        texture_phase=(u[4], u[5]),
        noise=noise,
        objects=tuple(objects),
    )


def _draw_object(seed: int, number: int, split: str, view: int) -> SceneObject:
    """Draw an object; the first one (view 0) is near and its class cycles with the number."""
    index = np.array([number], dtype=np.int64)
    key = draws.sample_keys(seed, 0, index, view, f"scenes/{split}/object")
    u = [float(value) for value in draws.uniform(key, 8)[0]]
    is_main = view == 0
    class_index = number % len(CLASSES) if is_main else int(u[0] * len(CLASSES))
    near, far = (_NEAREST, _MAIN_FARTHEST) if is_main else (_MAIN_FARTHEST, _FARTHEST)
    distance = 1 / (1 / far + (1 / near - 1 / far) * u[1])  # uniform in size on the picture
    # hues spread over a third of the circle around the class's own: a hint, not the answer
    hue = (class_index / len(CLASSES) + (u[2] - 0.5) / 3) % 1
    reach = (0.25 if is_main else 0.5) * distance
    return SceneObject(
        name=CLASSES[class_index],
        colour=colorsys.hsv_to_rgb(hue, 0.5 + 0.45 * u[3], 0.55 + 0.4 * u[4]),
        distance=distance,
        offset=(2 * u[5] - 1) * reach,
        height=(1.15 if is_main else 0.9) + 0.5 * u[6],
        velocity=(0.3 * (2 * u[7] - 1), 0.2 * (2 * u[6] - 1)),
    )


def render(scene: Scene, size: int, frame: int = 0) -> tuple[ndarray, list[dict[str, Any]]]:
    """Draw a frame: uint8 RGB (size, size, 3), and all visible objects, from far to near.

    An object has id, class, colour, distance, box (x0, y0, x1, y1 in pixels), area, mask (uint8).
    """
    picture = _background(scene, size)
    masks: list[tuple[int, SceneObject, ndarray]] = []
    numbered = [(number, item.at(frame)) for number, item in enumerate(scene.objects)]
    for number, item in sorted(numbered, key=lambda pair: -pair[1].distance):
        x, y, pixel = _local_coordinates(scene, item, size)
        coverage, shade = SHAPES[item.name](x, y, pixel)
        shadow = np.clip(1.4 - np.hypot((x - 0.3) / 1.1, (y - 0.05) / 0.28), 0, 1)
        picture *= 1 - 0.45 * shadow[..., None]
        picture += coverage[..., None] * (_object_colour(scene, item, shade) - picture)
        masks = [(other, thing, mask * (1 - coverage)) for other, thing, mask in masks]
        masks.append((number, item, coverage))
    y, x = _pixel_centres(size)
    darkening = 1.05 - 0.45 * ((x - 0.5) ** 2 + (y - 0.5) ** 2)  # towards the corners
    picture *= darkening.astype(np.float32)[..., None]
    labels = [_describe(number, item, mask > 0.5) for number, item, mask in masks]
    labels = [label for label in labels if label["area"] > 0]
    return (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8), labels


def _background(scene: Scene, size: int) -> ndarray:
    """Return the sky with clouds above the horizon, the ground below: float32 (size, size, 3)."""
    top, haze, dark, bright = (np.array(colour, np.float32) for colour in KINDS[scene.kind])
    y, x = _pixel_centres(size)
    clouds = 0.7 * _stretch(scene.noise[0, :8, :4], size) + 0.3 * _stretch(scene.noise[0], size)
    soil = _stretch(scene.noise[1], size)
    height = np.clip((scene.horizon - y) / scene.horizon, 0, 1)[..., None]
    sky = haze + (top - haze) * np.sqrt(height)
    cloud = np.clip((clouds - 0.5) * 2.2, 0, 0.75)[..., None] * np.sqrt(height)
    sky += cloud * (0.95 - sky)
    depth = _FOCAL * _CAMERA_HEIGHT / np.maximum(y - scene.horizon, 0.5 / size)
    phase_x, phase_z = scene.texture_phase
    tiles = np.sin(6.3 * ((x - 0.5) * depth * 1.4 + phase_x))
    tiles = tiles * np.sin(6.3 * (depth * 0.7 + phase_z))
    blend = 0.5 + 0.5 * np.tanh(3 * tiles) * np.exp(-depth / 9)  # far tiles fade, without aliasing
    blend = np.clip(blend + 0.25 * (soil - 0.5), 0, 1)[..., None]
    ground = dark + (bright - dark) * blend
    mist = 1 - np.exp(-depth / 25)[..., None]
    ground += mist * (haze * 0.9 - ground)
    edge = np.clip((y - scene.horizon) * size + 0.5, 0, 1)[..., None]
    return ((sky + edge * (ground - sky)) * scene.light).astype(np.float32)


def _pixel_centres(size: int) -> ndarray:
    """Return y and x of every pixel's middle, from 0 to 1: float32 (2, size, size)."""
    return np.mgrid[0:size, 0:size].astype(np.float32) / size + 0.5 / size


def _stretch(grid: ndarray, size: int) -> ndarray:
    picture = Image.fromarray(grid.astype(np.float32))
    return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC))


def _local_coordinates(
    scene: Scene, item: SceneObject, size: int
) -> tuple[ndarray, ndarray, float]:
    """Return x and y of every pixel in the object's units, and the width of a pixel in them."""
    foot_y = scene.horizon + _FOCAL * _CAMERA_HEIGHT / item.distance
    foot_x = 0.5 + _FOCAL * item.offset / item.distance
    half = 0.5 * _FOCAL * item.height / item.distance
    y, x = _pixel_centres(size)
    return (x - foot_x) / half, (foot_y - y) / half, 1 / (half * size)


def _object_colour(scene: Scene, item: SceneObject, shade: ndarray) -> ndarray:
    """Return the lit colour of an object seen through the air: float32 (size, size, 3)."""
    colour = np.array(item.colour, np.float32) * (shade * scene.light)[..., None]
    haze = np.array(KINDS[scene.kind][1], np.float32)
    return colour + (1 - np.exp(-item.distance / 40)) * (haze - colour)


def _describe(number: int, item: SceneObject, mask: ndarray) -> dict[str, Any]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = [0, 0, 0, 0]
    if rows.size:
        box = [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]
    return {
        "id": number,
        "class": item.name,
        "colour": [round(value, 4) for value in item.colour],
        "distance": round(item.distance, 4),
        "box": box,
        "area": int(mask.sum()),
        "mask": mask.astype(np.uint8),
    }
