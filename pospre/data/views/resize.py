"""From a decoded image to views: crop and resize boxes, for every storage format.

The loop over the views is TorchScript. It does not hold Python's lock, so threads work in parallel
for any number of views.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pospre.data.views.boxes import Crops
from pospre.errors import needing

_OPENCV_CHANNELS = 4  # that it resizes at once


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


@torch.jit.script
def _resize_boxes(
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
