"""Images with depths in metres: data set layouts and their checks.

Supported are ``<split>/images/*`` with ``<split>/depth/*`` of the same names (16-bit PNG, metres ×
``scale``; or ``.npy`` in metres); NYUv2's lists ``nyu_<split>.txt`` with lines "image depth focal";
and rendered scenes, whose labels hold the horizon and the objects' distances.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from pycocotools import mask as coco_mask
from torch import Tensor

from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.errors import UserError
from pospre.evaluation.common_settings import Half
from pospre.evaluation.dense.images import (
    LABELS,
    files_by_stem,
    image_sides,
    in_half,
    read_image,
    read_mask,
    scene_folder,
    scene_lines,
)
from pospre.text_lists import read_text
from pospre.untrusted_json import is_number

SCENES_MAX = 16.0  # metres; objects are nearer, and the ground has no end
_NYU = {"val": "test"}
_NYU_SIDES = (480, 640)


@dataclass(frozen=True)
class DepthSet:
    """A split of a data set.

    Attributes:
        address: for messages.
        images: files, sorted.
        truths: for each image its file of depths, or its line in the scenes' labels.
        scale: values of a file of whole numbers per metre.
        is_listed: whether NYUv2's list names them.
    """

    address: str
    images: Sequence[Path]
    truths: Sequence[Any]
    scale: float
    decoding: Decoding = RGB
    is_listed: bool = False

    def __len__(self) -> int:
        return len(self.images)

    @property
    def is_rendered(self) -> bool:
        """Whether these are rendered scenes."""
        return isinstance(self.truths[0], dict)

    def of_half(self, half: Half | None) -> "DepthSet":
        """Return a half of the split; all of it for None."""
        images, truths = (in_half(part, half, self.address) for part in (self.images, self.truths))
        return replace(self, images=images, truths=truths)

    def is_framed(self, index: int) -> bool:
        """Whether this is a whole photograph of NYUv2, which has a white frame."""
        return self.is_listed and image_sides(self.images[index]) == _NYU_SIDES

    def image(self, index: int) -> Tensor:
        """Return an image's pixels, uint8 (3, H, W)."""
        return read_image(self.images[index], self.decoding)

    def depth(self, index: int, max_depth: float) -> Tensor:
        """Return depths in metres, float32 (H, W); 0 where there is no truth.

        Real depths beyond ``max_depth`` are no truth; those of scenes are clipped, the sky is 0.
        """
        metres = self._recorded(index)
        if self.is_rendered:
            metres = metres.clip(max=max_depth)
        known = np.isfinite(metres) & (metres > 0) & (metres <= max_depth)
        return torch.from_numpy(np.where(known, metres, 0).astype(np.float32))

    def known(self, index: int, limit: float) -> Tensor:
        """Return the depths up to a limit; raise a ``UserError`` if all are unknown."""
        depth = self.depth(index, limit)
        if not bool(depth.any()):
            where = "" if math.isinf(limit) else f" between 0 and max_depth={limit:g} m"
            raise UserError(
                f"{self.images[index]} has no depth{where}; leave it out, or give another "
                "max_depth=… or scale=…."
            )
        return depth

    def _recorded(self, index: int) -> ndarray:
        """Return the depths in metres, (H, W)."""
        truth = self.truths[index]
        if isinstance(truth, dict):
            return _rendered(truth, image_sides(self.images[index]), self.address)
        if truth.suffix == ".npy":
            try:
                values = np.load(truth, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise UserError(f"{truth} is not a readable array ({error}).") from error
            if values.ndim != 2 or values.dtype.kind not in "fui":
                raise UserError(f"{truth} holds {values.dtype} {values.shape}, not depths (H, W).")
            metres: ndarray = values.astype(np.float64)
        else:
            metres = read_mask(truth) / self.scale
        if metres.shape != image_sides(self.images[index]):
            raise UserError(
                f"{truth} has {metres.shape[0]}×{metres.shape[1]} depths, but its image has "
                f"{'×'.join(map(str, image_sides(self.images[index])))} pixels."
            )
        return metres


class Known(NamedTuple):
    """What is read of the training depths, once.

    Attributes:
        largest: in metres.
        mean: their geometric mean.
        small: all of a look, at the size of its views.
    """

    largest: float
    mean: float
    small: list[Tensor]


def read_depths(data: DepthSet, limit: float, view: tuple[int, int] | None) -> Known:
    """Read all depths up to a limit, and keep them at the size of views, if there are some."""
    largest, total, count = 0.0, 0.0, 0
    small: list[Tensor] = []
    for index in range(len(data)):
        depth = data.known(index, limit)
        known = depth[depth > 0].double()
        largest = max(largest, float(known.max()))
        total, count = total + float(known.log().sum()), count + len(known)
        if view is None:
            continue
        small.append(F.interpolate(depth[None, None], view)[0, 0])
        if int(small[-1].count_nonzero()) < 2:
            raise UserError(
                f"{data.images[index]} has hardly a depth left at {view[0]}×{view[1]} pixels; "
                "leave it out, or give a larger size=…."
            )
    return Known(largest, math.exp(total / count), small)


def open_depths(root: str, split: str, scale: float, decoding: Decoding = RGB) -> DepthSet:
    """Find a split of a data set; ``UserError`` if there is none."""
    base = Path(root)
    if (base / split / "depth").is_dir():
        pictures, truths = base / split / "images", base / split / "depth"
        images = files_by_stem(pictures)
        files = sorted(path for path in truths.rglob("*") if path.suffix in (".png", ".npy"))
        depths = files_by_stem(truths, [path.relative_to(truths).as_posix() for path in files])
        shared = sorted(images.keys() & depths.keys())
        if not shared or images.keys() ^ depths.keys():
            odd = sorted(images.keys() ^ depths.keys())
            raise UserError(
                f"{base / split}: images and depths need the same names; "
                f"{len(odd)} are alone{f', such as {odd[0]}' if odd else ''}."
            )
        pairs = [images[name] for name in shared], [depths[name] for name in shared]
        return DepthSet(str(base / split), *pairs, scale, decoding)
    listed = base / f"nyu_{_NYU.get(split, split)}.txt"
    if listed.is_file():
        return _of_list(base, listed, scale, decoding)
    if folder := scene_folder(base, split):
        lines = scene_lines(folder)
        if not all(is_number(line.get("horizon")) for line in lines):
            raise UserError(
                f"{folder / LABELS} has no horizon; render the scenes again: python -m "
                "data_prep.scenes."
            )
        paths = [folder / line["path"] for line in lines]
        return DepthSet(str(folder), paths, lines, scale, decoding)
    raise UserError(
        f"{root} has no split '{split}' with depths: {split}/images with {split}/depth, "
        f"{listed.name}, or {LABELS} of rendered scenes."
    )


def _of_list(base: Path, listed: Path, scale: float, decoding: Decoding) -> DepthSet:
    images, truths = [], []
    for number, line in enumerate(read_text(listed).splitlines(), start=1):
        parts = line.split()
        if not parts or "None" in parts:  # images without depths
            continue
        if len(parts) < 2:
            raise UserError(f"{listed}, line {number}, is not 'image depth focal'.")
        image, truth = (base / part.lstrip("/") for part in parts[:2])
        for path in (image, truth):
            if not path.resolve().is_relative_to(base.resolve()) or not path.is_file():
                raise UserError(f"{listed}, line {number}: {path} does not exist in the data set.")
        images.append(image)
        truths.append(truth)
    if not images:
        raise UserError(f"{listed} lists no images with depths.")
    return DepthSet(str(listed), images, truths, scale, decoding, is_listed=True)


def _rendered(line: dict[str, Any], sides: tuple[int, int], address: str) -> ndarray:
    """Return the depths of a scene: 1 / (y − horizon) for the ground, as its renderer has it."""
    height, width = sides
    y = (np.arange(height) + 0.5) / height
    below = y - line["horizon"] / height
    ground = np.where(below > 0, 1 / np.maximum(below, 0.5 / height), 0)
    metres = np.repeat(ground[:, None], width, axis=1)
    for item in line["objects"]:  # from far to near
        if not is_number(item.get("distance")):
            raise UserError(f"{address}/{LABELS}: an object of {line['path']} has no distance.")
        shown = coco_mask.decode(coco_mask.frPyObjects(item["mask"], height, width))
        metres[shown.astype(bool)] = item["distance"]
    return metres
