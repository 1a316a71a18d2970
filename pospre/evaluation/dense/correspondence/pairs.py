"""Pairs of images with points that belong together: by a drawn homography, or SPair-71k's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre import draws
from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.errors import UserError
from pospre.evaluation.common_settings import Half
from pospre.evaluation.dense.correspondence.matching import apply_homography
from pospre.evaluation.dense.images import in_half, read_image
from pospre.text_lists import read_text
from pospre.untrusted_json import is_number, parse_object

LAYOUT = Path("Layout") / "large"
_TURN, _ZOOM, _TILT = math.radians(20), (0.7, 1.4), 0.1
_COLOUR = 0.3  # brightness, contrast and saturation change by up to this share
_POINTS = 10  # in each direction


class Pair(NamedTuple):
    """Two normalised images and their points.

    Attributes:
        images_2CHW: source and target.
        source_K2: points (x, y) in pixels of the source.
        target_K2: the same points in the target.
        sides_2: pixels of the target's own image per pixel of its view, (x, y).
        extent: what errors are divided by, in pixels of the target's own image.
        kind: its class, or "".
    """

    images_2CHW: Tensor
    source_K2: Tensor
    target_K2: Tensor
    sides_2: Tensor
    extent: float
    kind: str = ""


def draw_homographies(seed: int, index_B: Tensor, size: int) -> Tensor:
    """Return homographies (B, 3, 3) in pixels, each a function of the seed and an image's index.

    Rotation by up to 20°, scale 0.7 to 1.4, every second one mirrored, perspective up to 0.1.
    """
    keys = draws.sample_keys(seed, 0, index_B.cpu(), 0, "correspondence/homography")
    u = draws.uniform(keys, 5).double()
    angle = (2 * u[:, 0] - 1) * _TURN
    scale = _ZOOM[0] * (_ZOOM[1] / _ZOOM[0]) ** u[:, 1]
    mirror = torch.where(u[:, 2] < 0.5, -1.0, 1.0)
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    unit_B33 = torch.zeros(len(u), 3, 3, dtype=torch.float64)
    unit_B33[:, 0, 0], unit_B33[:, 0, 1] = cosine * mirror, -sine
    unit_B33[:, 1, 0], unit_B33[:, 1, 1] = sine * mirror, cosine
    unit_B33[:, 2, :2] = (2 * u[:, 3:5] - 1) * _TILT
    unit_B33[:, 2, 2] = 1
    half = size / 2
    to_pixels = torch.tensor([[half, 0, half], [0, half, half], [0, 0, 1]], dtype=torch.float64)
    return to_pixels @ unit_B33 @ torch.linalg.inv(to_pixels)


def change_colours(levels_CHW: Tensor, seed: int, index: int) -> Tensor:
    """Return levels from 0 to 255 with other brightness, contrast and saturation."""
    keys = draws.sample_keys(seed, 0, torch.tensor([index]), 0, "correspondence/colour")
    factors = 1 + (2 * draws.uniform(keys, 3)[0] - 1) * _COLOUR
    bright, contrast, saturation = factors.tolist()
    levels = levels_CHW * bright
    levels = levels.mean() + contrast * (levels - levels.mean())
    grey = levels.mean(0, keepdim=True)
    return (grey + saturation * (levels - grey)).clamp(0, 255)


def warped(image_CHW: Tensor, matrix_33: Tensor) -> Tensor:
    """Return an image moved by a homography in its pixels; what comes from outside is 0."""
    _, height, width = image_CHW.shape
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    centres = torch.stack([columns, rows], -1).view(-1, 2).double() + 0.5
    before = apply_homography(torch.linalg.inv(matrix_33), centres)
    places = before / torch.tensor([width, height]) * 2 - 1
    grid = places.view(1, height, width, 2).to(image_CHW)
    return F.grid_sample(image_CHW[None], grid, align_corners=False)[0]


def homography_pair(
    levels_CHW: Tensor, normalise: Any, seed: int, index: int, size: int
) -> Pair | None:
    """Return an image and a view of it by a homography; None: no point is in both.

    ``normalise`` takes levels from 0 to 255. Errors are shares of the side.
    """
    (matrix,) = draw_homographies(seed, torch.tensor([index]), size)
    other = normalise(change_colours(levels_CHW, seed, index))
    steps = (torch.arange(_POINTS).double() + 0.5) * size / _POINTS
    source = torch.cartesian_prod(steps, steps)
    target = apply_homography(matrix, source)
    inside = ((target >= 0) & (target <= size)).all(1)
    if not inside.any():
        return None
    images = torch.stack([normalise(levels_CHW), warped(other, matrix)])
    return Pair(images, source[inside], target[inside], torch.ones(2), float(size))


@dataclass(frozen=True)
class SPair:
    """A split of SPair-71k.

    Attributes:
        root: with ``Layout``, ``PairAnnotation`` and ``JPEGImages``.
        names: of the pairs, in the order of the list.
    """

    root: Path
    split: str
    names: Sequence[str]
    decoding: Decoding = RGB

    def described(self, name: str) -> dict[str, Any]:
        """Return a pair's annotation; ``UserError`` if it is not one."""
        path = self.root / "PairAnnotation" / self.split / f"{name}.json"
        try:
            annotation = parse_object(path.read_bytes())
            points = [_numbers(annotation[key], 2) for key in ("src_kps", "trg_kps")]
            ((x0, y0, x1, y1),) = _numbers([annotation["trg_bndbox"]], 4)
            if len(points[0]) != len(points[1]) or max(x1 - x0, y1 - y0) <= 0:
                raise ValueError("its points are not in pairs, or its box is empty")
            images = [self._image(annotation, key) for key in ("src_imname", "trg_imname")]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{path} is not an annotation of SPair-71k ({type(error).__name__}: {error}); "
                "unpack the data set again."
            ) from error
        for image in images:
            if not image.is_file():
                raise UserError(f"{path}: the image {image} does not exist.")
        return annotation

    def _image(self, annotation: dict[str, Any], key: str) -> Path:
        kind, name = str(annotation["category"]), str(annotation[key])
        if "/" in kind + name or ".." in (kind, name):
            raise ValueError(f"'{kind}/{name}' leads out of the data set")
        return self.root / "JPEGImages" / kind / name

    def pair(self, name: str, size: int, normalise: Any) -> Pair:
        """Return a pair; both images are resized to squares, whatever their shape."""
        annotation = self.described(name)
        views, scales = [], []
        for key in ("src_imname", "trg_imname"):
            pixels = read_image(self._image(annotation, key), self.decoding)[None].float()
            shown = F.interpolate(pixels, (size, size), mode="bicubic", antialias=True)
            views.append(normalise(shown[0].clamp(0, 255)))
            scales.append(torch.tensor([pixels.shape[3] / size, pixels.shape[2] / size]))
        source, target = (
            torch.tensor(annotation[key], dtype=torch.float64) for key in ("src_kps", "trg_kps")
        )
        x0, y0, x1, y1 = annotation["trg_bndbox"]
        extent = float(max(x1 - x0, y1 - y0))
        return Pair(
            torch.stack(views),
            source / scales[0],
            target / scales[1],
            scales[1],
            extent,
            str(annotation["category"]),
        )


def _numbers(rows: Any, width: int) -> list[list[float]]:
    """Return rows of numbers; ``ValueError`` if they are something else, or none."""
    numbers = [[*row] for row in rows]
    if not numbers or any(len(row) != width or not all(map(is_number, row)) for row in numbers):
        raise ValueError(f"{rows!r} are not rows of {width} numbers")
    return numbers


def open_spair(
    root: Path, split: str, count: int | None, seed: int, decoding: Decoding, half: Half | None
) -> SPair:
    """Open a split of SPair-71k: all pairs, or a half of them, in their order.

    Of these, ``count`` may be drawn by the seed.
    """
    path = root / LAYOUT / f"{split}.txt"
    if not path.is_file():
        known = sorted(each.stem for each in (root / LAYOUT).glob("*.txt"))
        raise UserError(f"{path} does not exist; give split=… of {', '.join(known) or 'none'}.")
    names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not names:
        raise UserError(f"{path} lists no pairs.")
    names = in_half(names, half, str(path))
    if count is not None and count < len(names):
        chosen = np.sort(draws.order(seed, 0, len(names))[:count])
        names = [names[index] for index in chosen]
    return SPair(root, split, names, decoding)
