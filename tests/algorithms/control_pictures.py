"""Pictures that tell where a view was cut, and pictures that tell nothing: controls of tasks."""

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch import Tensor

from pospre import draws
from pospre.batch import Batch, box_key, flip_key, image_key
from pospre.data.views.boxes import NUM_BOX_DRAWS, random_boxes
from pospre.data.views.options import ViewGroup
from pospre.model.model import PretrainModel

_IMAGE = (1000, 1000)


def batch_of(views: dict[str, ViewGroup], number: int, *, told: bool, size: int = 64) -> Batch:
    """Return ``size`` samples with all views, cut from square images at random.

    ``told``: red is x and green is y in the image; otherwise each image has one random colour.
    """
    index = torch.arange(size) + number * size
    batch: Batch = {"index": index, "epoch": torch.zeros_like(index)}
    colour = draws.uniform(draws.sample_keys(0, 0, index, 0, "colour"), 3)[:, None, :, None, None]
    for name, group in views.items():
        keys = draws.sample_keys(0, 0, index[:, None], torch.arange(group.count), name)
        draw = draws.uniform(keys, NUM_BOX_DRAWS + 1).flatten(0, 1).double().numpy()
        boxes = random_boxes(draw[:, 1:], _IMAGE, group.scale, group.ratio) / _IMAGE[0]
        corner, extent = torch.from_numpy(boxes.astype(np.float32)).view(size, -1, 4).chunk(2, -1)
        box = torch.cat([corner, corner + extent], -1)
        flip = torch.from_numpy(draw[:, 0]).view(size, -1) < group.flip_rate
        pixels = (
            _places(box, group.shape) if told else colour.expand(-1, group.count, -1, *group.shape)
        )
        batch[image_key(name)] = (pixels * 255).to(torch.uint8)
        batch[box_key(name)], batch[flip_key(name)] = box, flip
    return batch


def _places(box_BV4: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return views with red x and green y, blue 0: (B, V, 3, H, W)."""
    rows, cols = ((torch.arange(each) + 0.5) / each for each in shape)
    x0, y0, x1, y1 = (part[..., None, None] for part in box_BV4.unbind(-1))
    red = (x0 + (x1 - x0) * cols).expand(-1, -1, *shape)
    green = (y0 + (y1 - y0) * rows[:, None]).expand(-1, -1, *shape)
    return torch.stack([red, green, torch.zeros_like(red)], dim=2)


def train(model: PretrainModel, steps: int, *, told: bool, lr: float = 3e-3) -> Iterator[Batch]:
    """Train for some steps, and then yield prepared batches that were not seen, without end."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 10)
        optimizer.zero_grad()
        model(batch_of(model.views, step, told=told), progress=step / steps).loss.backward()
        optimizer.step()
        model.after_step(step / steps)
    for number in count(steps):
        yield model.prepare(batch_of(model.views, number, told=told), 1.0)
