"""Random erasing (Zhong et al. 2020) as timm's mode ``pixel``, for whole batches at once."""

import math

import torch
from torch import Tensor

NUM_TRIES = 10
NUM_DRAWS = 4 * NUM_TRIES  # area, aspect ratio, top, left
_AREA = (0.02, 1 / 3)
_LOG_ASPECT = (math.log(0.3), -math.log(0.3))


def erased_area(draw_NK: Tensor, height: int, width: int) -> Tensor:
    """Return a rectangle to erase in each image: bool (N, 1, H, W).

    It is the first of ten draws that is smaller than the image. If there is none, nothing is
    erased.
    """
    area, log_aspect, top, left = draw_NK.unflatten(1, (NUM_TRIES, 4)).unbind(2)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * area) * (height * width)
    aspect = torch.exp(_LOG_ASPECT[0] + (_LOG_ASPECT[1] - _LOG_ASPECT[0]) * log_aspect)
    tall, wide = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    fits = (tall < height) & (wide < width)
    top = (top * (height - tall + 1)).floor()
    left = (left * (width - wide + 1)).floor()
    first = fits.to(torch.int64).argmax(dim=1, keepdim=True)
    top, left, tall, wide = (
        value.gather(1, first).view(-1, 1, 1, 1) for value in (top, left, tall, wide)
    )
    rows = torch.arange(height, device=draw_NK.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=draw_NK.device)
    in_rows = (rows >= top) & (rows < top + tall)
    return in_rows & (columns >= left) & (columns < left + wide) & fits.any(1).view(-1, 1, 1, 1)
