"""Crop field: positions that belong to places of the original image (Intertwined, Sec. 3.2).

Positions come from a field of vectors over the original image. Every view's box is cut out of the
field as it is cut out of the image, and read at the patch centres: a crop knows where and how large
it was, and one place has one vector in all crops. Against learning absolute places and ImageNet's
object sizes, the boxes of an image are shrunk and moved together inside the field at every step.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.crop_field.field import (
    beta_2_5,
    enclosing_box,
    mirrored_image,
    place_boxes,
    reversed_columns,
    sample_field,
    sincos_in_boxes,
)
from pospre.batch import EPOCH, INDEX, Batch, box_key, field_box_key, flip_key, per_row
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass
from pospre.model.question import Question
from pospre.nn.encoder import Encoder
from pospre.nn.interpolation import Interpolation
from pospre.nn.masking import gather_tokens
from pospre.recipe.ranges import ShareRange

FieldKind = Literal["learned", "sincos"]
BoxScale = Literal["beta", "uniform", "const", "fill"]
FlipField = Literal["with_view", "box_only", "mirror_shared"]
Enclose = Literal["all", "globals"]


class PositionField(nn.Module):
    """The field, and the vectors at the patch centres of every view's box."""

    def __init__(
        self, encoder: Encoder, grids: dict[str, tuple[int, int]], options: "CropField"
    ) -> None:
        super().__init__()
        self.dim, self.cells, self.grids = encoder.embed_dim, encoder.grid, grids
        self.interpolation: Interpolation = options.interpolation
        self.field: nn.Parameter | None = None
        if options.field == "learned":
            side = options._side
            self.field = nn.Parameter(torch.empty(side, side, self.dim))
            nn.init.trunc_normal_(self.field, std=0.02)

    def forward(self, position_RKD: Tensor, batch: Batch, where: EncoderPass) -> Tensor:
        """Return the positions (R, K, D) of a pass in place of the table's.

        A batch without boxes holds whole images: they get the whole field.
        """
        rows, box_BV4 = len(position_RKD), batch.get(field_box_key(where.group))
        if box_BV4 is None:
            box_R4 = position_RKD.new_tensor([[0.0, 0.0, 1.0, 1.0]])
        else:
            box_R4 = box_BV4.flatten(0, 1)
        # half precision would err by a tenth of a cell
        with torch.autocast(position_RKD.device.type, enabled=False):
            field_RND = self._sample(box_R4, where.grid or self.grids[where.group])
        field_RND = field_RND.expand(rows, -1, -1)
        if where.keep is None:
            return field_RND
        return gather_tokens(field_RND, per_row(batch[where.keep], rows))

    def _sample(self, box_R4: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.field is None:
            return sincos_in_boxes(self.dim, box_R4.float(), grid, self.cells)
        precision = torch.promote_types(self.field.dtype, torch.float32)
        field = self.field.to(precision)
        return sample_field(field, box_R4.to(precision), grid, self.interpolation)


@dataclass(kw_only=True, eq=False)
class CropField(PretrainAlgorithm):
    """Gives the positions of every pass, beside any algorithm with additive positions.

    Writes ``g/field_box`` for every view group g: the boxes in the field, one draw for all views of
    an image. With ``mirror_shared`` it also writes ``g/flip``, in place of the loader's flips.

    The encoder's own table is left out: its rows of patches are set to zero and stay so; the class
    token keeps its position. Whole images get the whole field.

    Args:
        field: ``learned`` vectors drawn from N(0, 0.02²), or ``sincos``: smooth and fixed, the
            table of MAE over the whole field and its waves in between.
        field_size: side of the learned field in vectors; None: 50 there.
        interpolation: of the learned field, ``bicubic`` or ``bilinear``.
        box_scale: law of the area s of the rectangle around an image's views, in shares of the
            field: ``beta`` (2, 5) or ``uniform``, both stretched to ``scale_range``; ``fill`` is
            s = 1, as large as fits; ``const`` leaves the boxes where they are. s gives way where
            the rectangle would not fit.
        scale_range: least and largest s of ``beta`` and ``uniform``; None: [0.2, 1] there.
        enclose: the views in that rectangle: ``all``, or ``globals`` (then some local views leave
            the field, whose border goes on outside).
        flip_field: what becomes of the positions of a mirrored view. ``with_view`` mirrors them
            too, the literal reading: one place, one vector, but to a ViT that is the view with each
            patch mirrored in place. ``box_only`` leaves them, so that a mirrored object looks
            mirrored, at the price of vectors that belong to two places. ``mirror_shared`` keeps
            both: views and boxes of an image are mirrored together, as its first view is drawn.
    """

    question: ClassVar[Question | None] = Question(
        "A crop knows where in the photograph it was cut. What did the field of places become?",
        evaluation="field",
    )

    gives_positions: ClassVar[bool] = True

    field: FieldKind = "learned"
    field_size: Annotated[int, Field(ge=2)] | None = None
    interpolation: Interpolation = "bicubic"
    box_scale: BoxScale = "beta"
    scale_range: ShareRange | None = None
    enclose: Enclose = "all"
    flip_field: FlipField = "with_view"

    def attach(self, model: PretrainModel) -> None:
        """Add the field as the model's position source; a no-op if it is there."""
        if model.position_source == "crop_field":
            return
        _check(self, model)
        _check_unused(self)
        for group in model.views:
            model.registry.claim(field_box_key(group), "crop_field")
            if self.flip_field == "mirror_shared":
                model.registry.claim(flip_key(group), "crop_field")
        grids = {group: model.grid(group) for group in model.views}
        model.add_position_source("crop_field", PositionField(model.encoder, grids, self))
        _warn_of_table(model.encoder)
        _clear_table(model.encoder)
        if model.teacher is not None:
            _clear_table(model.teacher.module)

    @property
    def _side(self) -> int:
        return 50 if self.field_size is None else self.field_size

    @property
    def _scales(self) -> tuple[float, float]:
        return (0.2, 1.0) if self.scale_range is None else self.scale_range

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw where the boxes of an image lie in the field."""
        for name in model.views:
            if box_key(name) not in batch:
                raise UserError(
                    f"the batch lacks '{box_key(name)}', where in its image each view was cut, "
                    "which crop_field takes as its position; pospre.build_loader writes it, and "
                    "pospre.from_images(images, boxes=…, mirrored=…)."
                )
        groups = {name: batch[box_key(name)].shape[1] for name in model.views}
        box_BV4 = torch.cat([batch[box_key(name)] for name in groups], dim=1).double()
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
            box_BV4 = reversed_columns(box_BV4, flip_BV)
        parts = box_BV4.float().split(list(groups.values()), dim=1)
        batch.update({field_box_key(name): part for name, part in zip(groups, parts, strict=True)})

    def _place(self, box_BV4: Tensor, enclosed: slice, batch: Batch, seed: int) -> Tensor:
        """Return the boxes after the position-and-scale augmentation (Sec. 3.2.2)."""
        keys = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "crop_field/place")
        draw = draws.uniform(keys, 8).double()
        low, high = self._scales
        share = beta_2_5(draw[:, :6]) if self.box_scale == "beta" else draw[:, 0]
        area = torch.ones_like(share) if self.box_scale == "fill" else low + (high - low) * share
        around = enclosing_box(box_BV4[:, enclosed])
        return place_boxes(box_BV4, around, area, draw[:, 6:])


def _warn_of_table(encoder: Encoder) -> None:
    """Say in a line that a table that was loaded is of no use."""
    if encoder.table_from is not None:
        warnings.warn(
            f"crop_field gives the positions of patches from now on: those of {encoder.table_from} "
            "are lost, only the class token keeps its own",
            stacklevel=5,
        )


@torch.no_grad()
def _clear_table(encoder: nn.Module) -> None:
    """Empty the table's rows of patches; without rows of other tokens it has nothing to learn."""
    assert isinstance(encoder, Encoder) and encoder.pos_embed is not None
    encoder.pos_embed[:, encoder.num_prefix_tokens :] = 0
    if not encoder.num_prefix_tokens:
        encoder.pos_embed.requires_grad_(False)


def _views_of(name: str, counts: dict[str, int]) -> slice:
    """Return where a group's views stand among those of all groups."""
    names = list(counts)
    first = sum(counts[other] for other in names[: names.index(name)])
    return slice(first, first + counts[name])


def _check(options: CropField, model: PretrainModel) -> None:
    """Raise ``UserError`` for options that cannot be, and company that it cannot keep."""
    model.registry.give_positions("crop_field")
    kind = model.encoder.position_kind
    if kind not in ("sincos", "learned"):
        raise UserError(
            f"crop_field adds positions to the patches, but encoder.positions is {kind}. "
            "Use learned (the class token learns its position) or sincos (it has none)."
        )
    if not model.registry.passes:
        raise UserError(
            "algorithms.crop_field gives positions to the passes of other algorithms, and none "
            "stands before it. Add a host (dinov2, ijepa, mae) or droppos, and list crop_field "
            "after it."
        )
    if options.enclose == "globals" and "global" not in model.views:
        raise UserError(
            "crop_field.enclose is globals, but data.views has no group 'global' (only "
            f"{', '.join(model.views)}). Use all."
        )


def _check_unused(options: CropField) -> None:
    """Raise ``UserError`` for an option that another one makes of no use."""
    drawn, placed = options.box_scale in ("beta", "uniform"), options.box_scale != "const"
    scale, field = f"box_scale = {options.box_scale}", f"field = {options.field}"
    for key, value, used, other in (
        ("field_size", options.field_size, options.field == "learned", field),
        ("interpolation", options.interpolation, options.field == "learned", field),
        ("scale_range", options.scale_range, drawn, scale),
        ("enclose", options.enclose, placed, scale),
    ):
        if not used and value not in (None, "bicubic", "all"):
            raise UserError(
                f"crop_field.{key} = {value} is of no use with crop_field.{other}. "
                "Remove one of the two."
            )
