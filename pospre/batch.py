"""The batch: the one data contract between loader, algorithms, model and evaluations.

A batch is a dict of tensors, batch first. B samples, V views of one group, H×W pixels.

==============  ===============  =======  =========  ==============================================
key             shape            dtype    written by meaning
==============  ===============  =======  =========  ==============================================
``index``       (B,)             int64    loader     position of the sample in the data set
``epoch``       (B,)             int64    loader     epoch that the draws belong to; if samples are
                                                     repeated, each repeat counts as one
``label``       (B,)             int64    loader     class, or −1 when unknown
``g/image``     (B, V, 3, H, W)  uint8    loader     RGB pixels of view group g, not yet flipped;
                                                     in memory channels come last; instead of 3 as
                                                     many as ``encoder.channels`` says; of features
                                                     (speech) float32 (B, V, 1, H, W)
``g/box``       (B, V, 4)        float32  loader     x0, y0, x1, y1 of the view in [0, 1] of the
                                                     upright original image, before the flip;
                                                     a view that was padded reaches a little over
``g/flip``      (B, V)           bool     loader     the device step mirrors this view left–right
``g/visible``   (B, K)           int64    host       patches whose content the encoder sees, in the
                                                     host's order
``g/hidden``    (B, N−K)         int64    host       the others: left out, or behind a mask token
``g/masked``    (B, N)           bool     host       tokens that are replaced by a mask token
``g/target``    (B, K)           int64    lut        patches that the teacher sees, if not all
``a/known``     (B, …)           bool     algorithm  tokens whose places the encoder knows; it
                                                     forgets the others
``g/field_box`` (B, V, 4)        float32  algorithm  x0, y0, x1, y1 of the view in the position
                                                     field, the whole of which is [0, 1]; x0 > x1
                                                     where positions are mirrored with the view
``a/…``         (B, …)           any      algorithm  what else algorithm a draws before the forward
                                                     pass, such as dropped positions
``g/place_keys`` (B, V)          int64    model      draw keys, where places are augmented in
                                                     training; inside a forward only
``g/pixels``    (B, V, 3, H, W)  float32  model      flipped, augmented in training, normalised;
                                                     inside a forward only
==============  ===============  =======  =========  ==============================================

Every value has the batch first, and nothing is nested. Composer can therefore split a batch into
microbatches and move it to a device without special cases.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pospre import draws
from pospre.errors import UserError

Batch = dict[str, Tensor]

INDEX = "index"
EPOCH = "epoch"
LABEL = "label"
VISIBLE = "view/visible"
HIDDEN = "view/hidden"
MASKED = "view/masked"


def from_images(
    images: Tensor,
    *,
    index: Tensor,
    epoch: int | None = None,
    label: Tensor | None = None,
    boxes: Tensor | None = None,
    mirrored: Tensor | None = None,
    group: str = "view",
) -> Batch:
    """Return a batch for the algorithms from the images of any loader.

    Crop and mirror the images yourself. Without ``mirrored`` they count as not mirrored.

    Args:
        images: uint8 (B, C, H, W), or (B, V, C, H, W) with several views of each sample.
        index: (B,) position of each sample in the data set: masks are drawn from it.
        epoch: counted from 0, masks are drawn from it too; None leaves it to Composer's Trainer.
        label: (B,) classes, for ``supervised``; None: unknown.
        boxes: (B, 4), or (B, V, 4), where in the whole image each view was cut: left, top, right
            and bottom as shares of its sides. ``crop_field`` needs them, and ``mirrored``; None:
            unknown.
        mirrored: bool (B,), or (B, V), the images that show what was cut there from right to left.
            The batch has them upright with a flip; needed with ``boxes`` only.
        group: the view group that these are.

    Raises:
        UserError: the images are not uint8 or have another shape; ``index``, ``label`` or ``boxes``
            do not have one entry per image; or boxes come without ``mirrored``.
    """
    if not isinstance(images, Tensor):
        raise UserError(
            f"from_images got a {type(images).__name__} of images, but takes a tensor: "
            "torch.as_tensor of an array, torch.stack of a list."
        )
    if images.dtype != torch.uint8 or images.ndim not in (4, 5):
        raise UserError(
            f"from_images got images of {images.dtype} and shape {tuple(images.shape)}, but takes "
            "uint8 (B, C, H, W), as torchvision.transforms.PILToTensor makes them: the model "
            "normalises them itself."
        )
    if epoch is not None and (not hasattr(epoch, "__index__") or epoch < 0):
        raise UserError(f"from_images got epoch={epoch}; give the number of the epoch, from 0.")
    views = images.unsqueeze(1) if images.ndim == 4 else images
    rows, count = views.shape[:2]
    numbers = _numbers("index", index, images)
    batch = {
        INDEX: numbers,
        LABEL: torch.full_like(numbers, -1) if label is None else _numbers("label", label, images),
        image_key(group): views,
        flip_key(group): views.new_zeros(rows, count, dtype=torch.bool),
    }
    if mirrored is not None:
        flips = _one_each(mirrored, images).to(views.device).view(rows, count)
        batch[flip_key(group)] = flips
        batch[image_key(group)] = torch.where(flips[..., None, None, None], views.flip(-1), views)
    if boxes is not None:
        if boxes.shape != (*images.shape[:-3], 4):
            raise UserError(
                f"from_images got boxes of shape {tuple(boxes.shape)} for images of shape "
                f"{tuple(images.shape)}; give left, top, right and bottom of each view."
            )
        if mirrored is None:
            raise UserError(
                "from_images got boxes, but not which views are mirrored. A mirrored view shows "
                "its box from right to left. Give mirrored=…, bool (B,); if none is mirrored, "
                "torch.zeros(B, dtype=torch.bool)."
            )
        check_shares(boxes, "from_images got")
        batch[box_key(group)] = boxes.to(views.device).float().view(rows, count, 4)
    return batch if epoch is None else numbered(batch, epoch=int(epoch))


def _one_each(mirrored: Tensor, images: Tensor) -> Tensor:
    """Return ``mirrored``, a bool for each view."""
    if mirrored.shape != images.shape[:-3] or mirrored.dtype != torch.bool:
        raise UserError(
            f"from_images got mirrored of {mirrored.dtype} and shape {tuple(mirrored.shape)} "
            f"for images of shape {tuple(images.shape)}; give a bool for each view."
        )
    return mirrored


def known_boxes(batch: Batch, group: str, method: str) -> Tensor:
    """Return the boxes (B, V, 4) of a group, as shares of the image, for a method that needs them.

    Raises:
        UserError: the batch lacks them, or has them in pixels.
    """
    if box_key(group) not in batch:
        raise UserError(
            f"the batch lacks '{box_key(group)}', the place of each view in its image, which "
            f"{method} needs. pospre.build_loader writes it. For your own images, use "
            "pospre.from_images(images, boxes=…, mirrored=…)."
        )
    check_shares(batch[box_key(group)], f"the batch's '{box_key(group)}' has")
    return batch[box_key(group)]


def check_shares(boxes: Tensor, start: str) -> None:
    """Raise ``UserError`` for boxes in pixels, or with width and height as last two numbers.

    ``start`` begins the message. Values are checked as in ``Places.check``.
    """
    values = readable(boxes)
    if values is None:
        return
    low, high = values[..., :2], values[..., 2:]
    # a padded view reaches over the edge, by 4 of 8 pixels at most
    if not ((low >= -0.5) & (low < high) & (high <= 1.5)).all():
        raise UserError(
            f"{start} boxes from {values.min():.4g} to {values.max():.4g}; give left, top, "
            "right and bottom as shares of the whole image's width and height, from 0 to 1."
        )


def readable(tensor: Tensor | None) -> np.ndarray | None:
    """Return the tensor's values if they can be read without waiting; otherwise None."""
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_cpu:
        return None
    plain = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    # NumPy reads without an ``item``, which steps do not have
    return None if isinstance(plain, FakeTensor) else plain.numpy()  # a mode makes any tensor fake


def _numbers(key: str, values: Tensor, images: Tensor) -> Tensor:
    """Return one integer per image, int64 (B,), on its device."""
    try:
        numbers = torch.as_tensor(values, device=images.device)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"from_images got {key} = {values!r:.60} ({type(values).__name__}); give one "
            "whole number for each image. Turn names into numbers once, for the whole data set: "
            "{name: number for number, name in enumerate(sorted(names))}."
        ) from None
    if numbers.shape != images.shape[:1] or numbers.is_floating_point():
        raise UserError(
            f"from_images got {key} of {numbers.dtype} and shape {tuple(numbers.shape)} for "
            f"{len(images)} images; give one whole number for each."
        )
    return numbers.long()


def whole_numbers(values: Tensor, key: str) -> Tensor:
    """Return a batch's numbers as int64, which gives the same draws everywhere.

    Raises:
        UserError: they are not a tensor (B,) of integers.
    """
    if not isinstance(values, Tensor) or values.ndim != 1 or values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise UserError(
            f"the batch's '{key}' is {kind} of shape {tuple(getattr(values, 'shape', ()))}: make "
            "it a tensor (B,) of int64, one number for each sample."
        )
    return values.long()


def without_images(size: int, views: Mapping[str, int]) -> Batch:
    """Return a batch of ``size`` samples without images, whole and not mirrored, for a trial.

    Args:
        size: number of samples.
        views: number of views by view group.
    """
    batch = {
        INDEX: torch.arange(size),
        EPOCH: torch.zeros(size, dtype=torch.int64),
        LABEL: torch.zeros(size, dtype=torch.int64),
    }
    for name, count in views.items():
        batch[box_key(name)] = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(size, count, 1)
        batch[flip_key(name)] = torch.zeros(size, count, dtype=torch.bool)
    return batch


def numbered(batch: Batch, *, epoch: int) -> Batch:
    """Return the batch with its epoch, unless the loader has written it.

    Raises:
        UserError: the samples have no index.
    """
    if not isinstance(batch, dict) or INDEX not in batch:
        what = f"a dict of {', '.join(batch)}" if isinstance(batch, dict) else type(batch).__name__
        raise UserError(
            f"the loader gave {what}; a batch is a dict with '{INDEX}', from which masks are "
            "drawn. Use pospre.build_loader, or make it with pospre.from_images."
        )
    index = whole_numbers(batch[INDEX], INDEX)
    return batch if EPOCH in batch else {**batch, EPOCH: torch.full_like(index, epoch)}


def image_key(group: str = "view") -> str:
    """Return the key of a view group's pixels."""
    return f"{group}/image"


def box_key(group: str = "view") -> str:
    """Return the key of a view group's crop boxes."""
    return f"{group}/box"


def per_row(value: Tensor, num_rows: int) -> Tensor:
    """Return a key's value for each row of a pass: (B, V, …) becomes (B·V, …), (B, …) stays.

    Args:
        value: (B, …) of a group with one view, or (B, V, …).
        num_rows: B·V.
    """
    return value if len(value) == num_rows and value.ndim == 2 else value.flatten(0, 1)


def view_keys(batch: Batch, count: int, seed: int, purpose: str, *, first: int = 0) -> Tensor:
    """Return draw keys (B, count) for ``count`` views of each sample, from number ``first`` on."""
    index, epoch = batch[INDEX].unsqueeze(1), batch[EPOCH].unsqueeze(1)
    views = torch.arange(count, device=index.device) + first
    return draws.sample_keys(seed, epoch, index, views, purpose)


def flip_key(group: str = "view") -> str:
    """Return the key of a view group's flips."""
    return f"{group}/flip"


def loaded_keys(groups: Iterable[str]) -> list[str]:
    """Return the keys that loaders write, without boxes, which their readers check."""
    return [LABEL, *(key(group) for group in groups for key in (image_key, flip_key))]


def field_box_key(group: str = "view") -> str:
    """Return the key of a view group's boxes in the position field."""
    return f"{group}/field_box"


def place_keys(group: str = "view") -> str:
    """Return the key of the draw keys of a view group's places."""
    return f"{group}/place_keys"
