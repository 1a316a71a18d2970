"""Cutting boxes out of an image and resizing them, all views of a group in one call.

The loop over the views is TorchScript: it runs without Python's lock from the first view to the
last, so that threads work side by side however many views an image has.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


def resize_crops(
    image: np.ndarray, boxes: np.ndarray, views: np.ndarray, interpolation: str
) -> None:
    """Cut boxes out of an image and resize them into views.

    The resize is antialiased like Pillow's and torchvision's: pixels differ by at most 1 from
    Pillow's ``crop(box).resize(…)``. ``"area"`` is OpenCV's, which FFCV uses. A box of a view's own
    size is copied as it is.

    Args:
        image: uint8 (H, W, 3), or of any type and number of channels where nothing is resized.
        boxes: left, top, width and height, int64 (V, 4).
        views: to be written, (V, h, w, channels), like the image.
        interpolation: ``"bicubic"``, ``"bilinear"`` or ``"area"``.
    """
    if interpolation == "area":
        for box, view in zip(boxes.tolist(), views, strict=True):
            left, top, width, height = box
            crop = np.ascontiguousarray(image[top : top + height, left : left + width])
            _opencv().resize(crop, view.shape[1::-1], dst=view, interpolation=_opencv().INTER_AREA)
        return
    numbers: list[int] = boxes.ravel().tolist()
    bicubic = interpolation == "bicubic"
    _resize_crops(torch.from_numpy(image), numbers, torch.from_numpy(views), bicubic)


@torch.jit.script
def _resize_crops(image: Tensor, boxes: list[int], views: Tensor, bicubic: bool) -> None:
    target = [views.size(1), views.size(2)]
    for number in range(views.size(0)):
        left, top, width, height = boxes[4 * number : 4 * number + 4]
        crop = image.narrow(0, top, height).narrow(1, left, width)
        if [height, width] == target:
            views[number].copy_(crop)
            continue
        # Batch first, then permuted: these strides are what selects the fast channels-last kernel.
        source = crop.contiguous().unsqueeze(0).permute(0, 3, 1, 2)
        view = views[number].unsqueeze(0).permute(0, 3, 1, 2)
        # What torch.nn.functional.interpolate(…, antialias=True) calls, but into the batch.
        if bicubic:
            torch.ops.aten._upsample_bicubic2d_aa(source, target, False, None, None, out=view)
        else:
            torch.ops.aten._upsample_bilinear2d_aa(source, target, False, None, None, out=view)


@cache
def _opencv() -> Any:
    import cv2  # only here: it takes a while to import

    cv2.setNumThreads(0)  # the loader has threads of its own
    return cv2
