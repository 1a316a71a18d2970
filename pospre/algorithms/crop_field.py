"""Crop field: positions that belong to places of the original image (Intertwined, Sec. 3.2).

The encoder's positions become a field over the original image. Every view's box is cropped from the
field as from the image, and read at the patch centres. A crop thus gets its position and size, and
a place has the same vector in all crops. At every step an image's boxes are scaled and moved
together in the field. So the encoder does not learn absolute places and ImageNet's object sizes.

A box is (x0, y0, x1, y1), the view's left, top, right and bottom edge, with the whole field as
[0, 1]². If x0 > x1, the view was mirrored together with its positions.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pospre import draws
from pospre.batch import EPOCH, INDEX, Batch, field_box_key, flip_key, known_boxes
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.task_description import TaskDescription
from pospre.model.uses import TableSize, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.grid import Interpolation
from pospre.nn.places import mirrored_boxes
from pospre.ranges import ShareRange

BoxScale = Literal["beta", "uniform", "const", "fill"]
FlipField = Literal["with_view", "box_only", "mirror_shared"]
Enclose = Literal["all", "globals"]


@dataclass(kw_only=True, eq=False)
class CropField(PretrainAlgorithm):
    """Places the views of every pass in the field, together with any algorithm.

    Writes ``g/field_box`` for every view group g: the boxes in the field, one draw for all views of
    an image. With ``mirror_shared`` it also writes ``g/flip``, instead of the loader's flips.

    ``encoder.positions`` determines the field. ``learned``: a table with its own size, drawn from
    N(0, 0.02²), or resampled once from a loaded table. ``sincos``: smooth, fixed waves. ``rotary``:
    queries and keys are rotated by the place in the field. Whole images get the whole field.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "A crop knows where in the photograph it was cut. What does its position field look like?",
        evaluation="field",
    )

    field_size: Annotated[int, Field(ge=2)] | None = None
    """Side of the learned field in vectors; default: 50."""
    interpolation: Interpolation = "bicubic"
    """Interpolation of the learned field."""
    box_scale: BoxScale = "beta"
    """Distribution of the area s of the rectangle around an image's views, as a share of the field:
    ``beta`` (2, 5) or ``uniform``, both stretched to ``scale_range``; ``fill``: s = 1, as large as
    fits; ``const``: boxes are not moved. s is reduced if the rectangle would not fit.
    """
    scale_range: ShareRange | None = None
    """Minimal and maximal s of ``beta`` and ``uniform``; default: [0.2, 1]."""
    enclose: Enclose = "all"
    """The views in this rectangle: ``all``, or ``globals`` (some local views then leave the field,
    whose border is extended).
    """
    flip_field: FlipField = "with_view"
    """Positions of a mirrored view. ``with_view`` mirrors them too, which is the literal reading:
    one place, one vector. To a ViT this is the view with each patch mirrored in place. ``box_only``
    does not mirror them: a mirrored object looks mirrored, but vectors belong to two places.
    ``mirror_shared`` has both: all views and boxes of an image are mirrored like its first view.
    """

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare that it places views, and the size of the field."""
        side = 50 if self.field_size is None else self.field_size
        learns = encoder.positions.learns
        keys: dict[str, str | None] = {field_box_key("*"): None}
        if self.flip_field == "mirror_shared":
            keys[flip_key("*")] = None
        return Uses(
            views={"global": None} if self.enclose == "globals" else {},
            keys=keys,
            table=TableSize((side, side), self.interpolation) if learns else None,
        )

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` for an option that has no effect together with another one."""
        super().check_encoder(encoder)
        positions = encoder.positions
        if not positions.takes_boxes:
            return  # refused for this
        drawn, placed = self.box_scale in ("beta", "uniform"), self.box_scale != "const"
        for option in ("field_size", "interpolation"):
            self.check_used(option, positions.learns, f"encoder.positions = {positions.name}")
        self.check_used("scale_range", drawn, "box_scale")
        self.check_used("enclose", placed, "box_scale")

    @property
    def _scales(self) -> tuple[float, float]:
        return (0.2, 1.0) if self.scale_range is None else self.scale_range

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the places of an image's boxes in the field."""
        boxes = {name: known_boxes(batch, name, "crop_field") for name in model.views}
        groups = {name: box.shape[1] for name, box in boxes.items()}
        box_BV4 = torch.cat([*boxes.values()], dim=1).double()
        flip_BV = torch.cat([batch[flip_key(name)] for name in groups], dim=1)
        if self.flip_field == "mirror_shared":
            flip_BV = flip_BV[:, :1].expand_as(flip_BV)
            box_BV4 = torch.where(flip_BV.unsqueeze(-1), mirrored_image(box_BV4), box_BV4)
            for name, count in groups.items():
                batch[flip_key(name)] = flip_BV[:, :count].clone()
        if self.box_scale != "const":
            enclosed = _views_of("global", groups) if self.enclose == "globals" else slice(None)
            box_BV4 = self._place(box_BV4, enclosed, batch, model.seed)
        if self.flip_field == "with_view":
            box_BV4 = mirrored_boxes(box_BV4, flip_BV)
        parts = box_BV4.float().split(list(groups.values()), dim=1)
        batch.update({field_box_key(name): part for name, part in zip(groups, parts, strict=True)})

    def _place(self, box_BV4: Tensor, enclosed: slice, batch: Batch, seed: int) -> Tensor:
        """Return the boxes after random scaling and shifting (Sec. 3.2.2)."""
        keys = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "crop_field/place")
        draw = draws.uniform(keys, 8).double()
        low, high = self._scales
        share = beta_2_5(draw[:, :6]) if self.box_scale == "beta" else draw[:, 0]
        area = torch.ones_like(share) if self.box_scale == "fill" else low + (high - low) * share
        around = enclosing_box(box_BV4[:, enclosed])
        return place_boxes(box_BV4, around, area, draw[:, 6:])


def _views_of(name: str, counts: dict[str, int]) -> slice:
    """Return the slice of a group's views among those of all groups."""
    names = list(counts)
    first = sum(counts[other] for other in names[: names.index(name)])
    return slice(first, first + counts[name])


def beta_2_5(uniform_B6: Tensor) -> Tensor:
    """Return draws of Beta(2, 5), the distribution of the second smallest of six uniform draws."""
    return uniform_B6.sort(dim=-1).values[..., 1]


def enclosing_box(box_BV4: Tensor) -> Tensor:
    """Return the tightest box around a sample's views: (B, 4)."""
    return torch.cat([box_BV4[..., :2].amin(1), box_BV4[..., 2:].amax(1)], dim=-1)


def place_boxes(box_BV4: Tensor, around_B4: Tensor, area_B: Tensor, shift_B2: Tensor) -> Tensor:
    """Scale and move a sample's boxes together, so that the box around them lies in the field.

    All boxes of a sample keep their shapes and their places relative to one another.

    Args:
        box_BV4: the views' boxes in the original image.
        around_B4: A, the box to place.
        area_B: s, the area of A; reduced if A would not fit.
        shift_B2: position of A in the remaining room, each in [0, 1].
    """
    size_B2 = around_B4[:, 2:] - around_B4[:, :2]
    factor = torch.minimum((area_B / size_B2.prod(-1)).sqrt(), 1 / size_B2.amax(-1)).unsqueeze(-1)
    offset = shift_B2 * (1 - factor * size_B2).clamp_min(0) - factor * around_B4[:, :2]
    return box_BV4 * factor.unsqueeze(-1) + offset.repeat(1, 2).unsqueeze(1)


def mirrored_image(box_BV4: Tensor) -> Tensor:
    """Return the boxes of the same views in the mirrored original image."""
    x0, y0, x1, y1 = box_BV4.unbind(-1)
    return torch.stack([1 - x1, y0, 1 - x0, y1], dim=-1)
