"""Decode once, crop many: from one opened image to all views of a sample.

A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if views differ by less than the tolerance, on
average over photographs. This depends only on the positions of the views and the image's size.
Boxes are then moved to whole pixels of the smaller image, even if the file cannot be decoded at
that size. So a sample has the same boxes in every storage format.

The loop over the views is TorchScript. It does not hold Python's lock, so threads work in parallel
for any number of views.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pospre.data.decode.decoder import OpenedImage
from pospre.data.decode.jpeg import SHRINKS, Box
from pospre.data.threads import Stopwatch
from pospre.data.views.boxes import Crops, hull
from pospre.errors import needing

_OPENCV_CHANNELS = 4  # that it resizes at once
# Error of views (RMS in grey levels of 255, mean over photographs) if images are decoded so small
# that they have this many pixels per view pixel (``test_crop`` measures it).
_OVERSAMPLING = ((3.6, 1.25), (2.6, 1.5), (2.0, 2.0), (1.1, 2.5), (0.9, 3.0), (0.75, 4.0))


class Views(NamedTuple):
    """The views of one group of a sample: their positions, and memory for their pixels.

    Attributes:
        pixels: output: uint8 (V, h, w, channels).
        interpolation: ``"bicubic"`` or ``"bilinear"``, antialiased like Pillow's and torchvision's:
            pixels differ by at most 1 from Pillow's ``crop(box).resize(…)``; or ``"area"``:
            OpenCV's, which FFCV uses. A box with the size of the view is copied.
    """

    crops: Crops
    pixels: np.ndarray
    interpolation: str


def resize_crops(
    image: np.ndarray, groups: Sequence[Views], origin: tuple[int, int] = (0, 0)
) -> None:
    """Write all views of an image, uint8 (H, W, channels); of any type where nothing is resized.

    ``origin`` is the column and row where ``image`` begins, in the pixels of the crops.
    """
    scripted = []
    for group in groups:
        if group.crops.windows is not None:
            _crop_windows(image, group, origin)
        elif group.interpolation == "area":
            _average(image, group, origin)
        else:
            scripted.append(group)
    if scripted:
        numbers: list[int] = []
        for group in scripted:
            numbers += group.crops.boxes.ravel().tolist()
        views = [torch.from_numpy(group.pixels) for group in scripted]
        bicubic = [group.interpolation == "bicubic" for group in scripted]
        _resize_boxes(torch.from_numpy(image), numbers, views, bicubic, *origin)


def _resize_each(
    image: Tensor, boxes: list[int], groups: list[Tensor], bicubic: list[bool], x: int, y: int
) -> None:
    at, pixels = 0, image.permute(2, 0, 1).unsqueeze(0)
    for group, is_bicubic in zip(groups, bicubic):  # noqa: B905 (unknown to TorchScript)
        views = group.permute(0, 3, 1, 2)
        target = [views.size(2), views.size(3)]
        for number in range(views.size(0)):
            left, top, width, height = boxes[at : at + 4]
            at += 4
            crop = pixels.narrow(2, top - y, height).narrow(3, left - x, width)
            view = views.narrow(0, number, 1)
            if [height, width] == target:
                view.copy_(crop)
                continue
            source = crop.contiguous(memory_format=torch.channels_last)  # selects the fast kernel
            # What torch.nn.functional.interpolate(…, antialias=True) calls, but into the batch.
            if is_bicubic:
                torch.ops.aten._upsample_bicubic2d_aa(source, target, False, None, None, out=view)
            else:
                torch.ops.aten._upsample_bilinear2d_aa(source, target, False, None, None, out=view)


with warnings.catch_warnings():  # deprecated, but what replaces it keeps Python's lock
    warnings.simplefilter("ignore", FutureWarning)
    _resize_boxes = torch.jit.script(_resize_each)


def _average(image: np.ndarray, group: Views, origin: tuple[int, int]) -> None:
    boxes = group.crops.boxes - (*origin, 0, 0)
    for (left, top, width, height), view in zip(boxes.tolist(), group.pixels, strict=True):
        crop = np.ascontiguousarray(image[top : top + height, left : left + width])
        if crop.shape[2] <= _OPENCV_CHANNELS:
            _opencv().resize(crop, view.shape[1::-1], dst=view, interpolation=_opencv().INTER_AREA)
            continue
        for channel in range(crop.shape[2]):
            plane = np.ascontiguousarray(crop[..., channel])
            view[..., channel] = _opencv().resize(
                plane, view.shape[1::-1], interpolation=_opencv().INTER_AREA
            )


@cache
def _opencv() -> Any:
    with needing("ffcv", "interpolation: area"):
        import cv2  # only here: it takes a while

    cv2.setNumThreads(0)  # the loader has threads of its own
    return cv2


def _crop_windows(image: np.ndarray, group: Views, origin: tuple[int, int]) -> None:
    crops = group.crops
    assert crops.windows is not None
    width, height = crops.scaled
    scaled, before = np.empty((1, height, width, image.shape[2]), np.uint8), None
    for box, window, view in zip(crops.boxes, crops.windows.tolist(), group.pixels, strict=True):
        if before is None or (box != before).any():  # mostly all are windows of the same
            whole = Crops(box[None], crops.scaled, None, crops.image)
            resize_crops(image, [Views(whole, scaled, group.interpolation)], origin)
        before = box
        rows, no_row = _lines(window[1], window[3], height)
        columns, no_column = _lines(window[0], window[2], width)
        np.copyto(view, scaled[0, rows[:, None], columns])
        if crops.edge == "black":
            view[no_row] = 0
            view[:, no_column] = 0


def _lines(start: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of ``size`` lines to take, mirrored at both ends, and which lie beyond."""
    wanted = np.arange(start, start + count)
    period = max(2 * size - 2, 1)
    folded = np.abs((wanted + size - 1) % period - (size - 1))
    return folded, (wanted < 0) | (wanted >= size)


def least_oversampling(tolerance: float) -> float:
    """Return the decoded pixels per view pixel that the tolerance requires, or infinity."""
    return next((pixels for error, pixels in _OVERSAMPLING if error <= tolerance), float("inf"))


def choose_shrink(groups: Sequence[Crops], oversampling: float) -> int:
    """Return the factor by which an image may be shrunk in decoding: 8, 4, 2 or 1."""
    least = min(float((crops.boxes[:, 2:] / crops.scaled).min()) for crops in groups)
    return next((shrink for shrink in SHRINKS if least >= shrink * oversampling), 1)


def snap(boxes: np.ndarray, shrink: int, width: int, height: int) -> np.ndarray:
    """Move boxes (V, 4) to whole pixels of an image ``shrink`` times smaller, in these pixels.

    If a box is the whole image, up to ``shrink`` − 1 lines are dropped at the far sides.
    """
    sides = np.array([width // shrink, height // shrink])
    wanted = np.rint(boxes / shrink).astype(np.int64)
    lengths = np.minimum(np.maximum(wanted[:, 2:], 1), sides)
    return np.hstack([np.minimum(wanted[:, :2], sides - lengths), lengths])


def pushed_into(boxes: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Return boxes (V, 4) moved and cut as little as possible to lie inside others."""
    lengths = np.minimum(boxes[:, 2:], outer[:, 2:])
    last = outer[:, :2] + outer[:, 2:] - lengths
    return np.hstack([np.clip(boxes[:, :2], outer[:, :2], last), lengths])


def _snapped(crops: Crops, shrink: int) -> np.ndarray:
    """Return the boxes of views in the smaller image; views inside others stay inside."""
    boxes = snap(crops.boxes, shrink, *crops.image)
    if crops.within is None:
        return boxes
    return pushed_into(boxes, snap(crops.within, shrink, *crops.image))


class DecodePlan(NamedTuple):
    """All views of one opened image, before it is decoded.

    Attributes:
        shrink: factor by which it may be shrunk in decoding.
        groups: its views, in the full-size image.
        small: its views, in the smaller image.
        needed: the part of the full-size image that contains all of them.
    """

    image: OpenedImage
    shrink: int
    groups: Sequence[Views]
    small: Sequence[Views]
    needed: Box


def plan_decoding(
    image: OpenedImage, groups: Sequence[Views], outputs: Sequence[np.ndarray], oversampling: float
) -> DecodePlan:
    """Choose how an image is decoded, and write the positions of its views.

    ``groups`` are its views in the full-size image, and ``outputs`` the output: each group's views
    as fractions of the image, float32 (V, 4). For ``oversampling`` see ``least_oversampling``.
    """
    shrink = choose_shrink([group.crops for group in groups], oversampling)
    if any(group.interpolation == "area" for group in groups):
        shrink = 1  # its steps are at other places in a smaller image, which is visible
    small = groups
    if shrink > 1:
        boxes = [_snapped(group.crops, shrink) for group in groups]
        small = _moved(groups, boxes)
        groups = _moved(groups, [shrink * some for some in boxes])
    for group, output in zip(groups, outputs, strict=True):
        output[:] = group.crops.relative
    needed = hull(np.concatenate([group.crops.boxes for group in groups]))
    return DecodePlan(image, shrink, groups, small, Box(*needed))


def _moved(groups: Sequence[Views], boxes: Sequence[np.ndarray]) -> list[Views]:
    return [
        group._replace(crops=group.crops._replace(boxes=some))
        for group, some in zip(groups, boxes, strict=True)
    ]


def write_views(plan: DecodePlan, watch: Stopwatch) -> None:
    """Decode an image once and write all its views; ``DecodeError`` if it is damaged."""
    picture, shrink, start = plan.image.decode(plan.shrink, plan.needed)
    watch.lap("decode")
    groups = plan.small if shrink == plan.shrink else plan.groups
    resize_crops(picture, groups, (start[0] // shrink, start[1] // shrink))
    watch.lap("resize")
    watch.num_images += 1
