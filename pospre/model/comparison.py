"""Objectives that compare the trained encoder's tokens with those of the reference."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from pospre.batch import Batch, box_key, flip_key, known_boxes, per_row
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.uses import Pass
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import gather_tokens
from pospre.nn.places import box_centres, mirrored_boxes

Views = Literal["unmasked", "all"]
Resize = Literal["auto", "bicubic"]
LOCAL = "local"
"""The view group whose views lie in those that the reference sees, and the pass over it."""
_GROUPS = {"student": "view", "global": "global"}
"""The trained encoder's passes over views that the reference sees, and their view groups."""


class Pair(NamedTuple):
    """The tokens of a pass and of the reference in float32, for views of each of B samples.

    Attributes:
        student: (B·V, K, D) patches that the trained encoder got.
        target: (B·V, K, D') the reference's at the same places.
        student_prefix: (B·V, P, D) tokens before them, the class token first.
        target_prefix: (B·V, P', D'); None: the reference sees more than these views.
        weight: (B, V), 1 for views that count, else 0.
    """

    student: Tensor
    target: Tensor
    student_prefix: Tensor
    target_prefix: Tensor | None
    weight: Tensor

    def mean(self, values_R: Tensor) -> Tensor:
        """Return the mean over samples of each one's mean over its views that count."""
        values_BV = values_R.view_as(self.weight)
        count = self.weight.sum(1).clamp_min(1)
        return ((values_BV * self.weight).sum(1) / count).mean()


class Comparison(Objective):
    """Reads a pass of the trained encoder and the reference's tokens at the same places.

    Args:
        encoder: the trained one.
        options: of the method.
        layout: of the model.
    """

    def __init__(
        self, encoder: PatchEncoder, options: "ComparisonAlgorithm", layout: Layout
    ) -> None:
        super().__init__()
        assert layout.reference is not None
        self.weight = options.weight
        self.prefix, self.reference_prefix = (
            each.num_prefix_tokens for each in (encoder, layout.reference)
        )
        self.resize: Resize = options.resize
        laid, groups = layout.passes, dict(_GROUPS)
        self.targets = {
            name: key for name in _GROUPS if (key := options.reference_pass(name)) in laid
        }
        self.outer = ""  # the group that local views lie in
        if options.local:
            self.outer, groups[LOCAL] = layout.views[LOCAL].inside or "", LOCAL
            whole = next(name for name, group in _GROUPS.items() if group == self.outer)
            self.targets[LOCAL] = self.targets[whole]
        self.read = [*self.targets]
        self.visible = {name: laid[name].visible for name in self.read}
        self.grids = {name: layout.grid(groups[name]) for name in self.read}
        self.reference_grids = {
            name: layout.reference.grid_of(*layout.views[laid[key].group].shape)
            for name, key in self.targets.items()
        }
        keys = {name: f"{groups[name]}/masked" for name in self.read}
        self.masks = {
            name: key
            for name, key in keys.items()
            if options.on == "unmasked" and key in layout.writers
        }

    @abstractmethod
    def compare(self, pair: Pair) -> Outputs:
        """Return the terms of a pass, by name."""

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return the terms of ``compare``, means over the passes; computed in float32."""
        with torch.autocast(batch["index"].device.type, enabled=False):
            terms = [self.compare(pair) for pair in self._pairs(passes, batch)]
        return {
            name: torch.stack([each[name] for each in terms if name in each]).mean()
            for name in terms[0]
        }

    def _pairs(self, passes: dict[str, Tensor], batch: Batch) -> Iterator[Pair]:
        """Yield what to compare, for each pass."""
        for name in self.read:
            student, target = passes[name].float(), passes[self.targets[name]].float()
            patches, prefix = target[:, self.reference_prefix :], target[:, : self.reference_prefix]
            old, new = self.reference_grids[name], self.grids[name]
            if name == LOCAL:
                patches = self._in_local_views(patches, old, new, batch)
            else:
                patches = on_grid(patches, old, new, self.resize)
            visible = self.visible[name]
            if visible is not None:
                patches = gather_tokens(patches, per_row(batch[visible], len(patches)))
            yield Pair(
                student[:, self.prefix :],
                patches,
                student[:, : self.prefix],
                None if name == LOCAL else prefix,
                self._weight(name, len(student), batch),
            )

    def _in_local_views(
        self, patches_RND: Tensor, old: tuple[int, int], new: tuple[int, int], batch: Batch
    ) -> Tensor:
        """Return the reference's patches of the outer views, read at those of local ones."""
        boxes = [
            mirrored_boxes(batch[box_key(group)], batch[flip_key(group)])
            for group in (self.outer, LOCAL)
        ]
        outer, inner = torch.broadcast_tensors(*boxes)
        each = len(outer.flatten(0, 1)) // len(patches_RND)  # local views in an outer one
        patches = patches_RND.repeat_interleave(each, dim=0)
        return in_box(patches, old, new, outer.flatten(0, 1), inner.flatten(0, 1))

    def _weight(self, name: str, rows: int, batch: Batch) -> Tensor:
        samples = len(batch["index"])
        if name not in self.masks:
            return torch.ones(samples, rows // samples, device=batch["index"].device)
        return (~per_row(batch[self.masks[name]], rows).any(-1)).float().view(samples, -1)


@dataclass(kw_only=True, eq=False)
class ComparisonAlgorithm(PretrainAlgorithm):
    """A method whose ``objective`` is a ``Comparison``."""

    on: Views = "unmasked"
    """Views that count: those in which no patch is replaced by a mask token, or all."""
    resize: Resize = "auto"
    """How the reference's map gets to another grid: ``auto``, bilinear or the mean; ``bicubic``."""
    local: bool = False
    """Also compare the patches of ``local`` views with those that the reference has at their place
    in the view that they are ``inside``.
    """
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def reference_pass(self, name: str) -> str:
        """Return the reference's pass beside the pass ``name``."""
        return f"reference/{name}"

    def passes(self, *, rolls: int = 0, class_token: str | None = None) -> dict[str, Pass]:
        """Return the passes to declare: those of a host, or over all patches, and the reference's.

        For the arguments see ``Pass``.
        """
        own = Pass(joins=True, or_all=True, optional=True)
        whole = {
            name: replace(own, group=group, class_token=class_token)
            for name, group in _GROUPS.items()
        }
        beside = {
            self.reference_pass(name): Pass(group, reference=True, optional=True, rolls=rolls)
            for name, group in _GROUPS.items()
        }
        local = {LOCAL: replace(own, group=LOCAL, optional=False)} if self.local else {}
        return {**whole, **local, **beside}

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Raise ``UserError`` if the places of local views are needed, but unknown."""
        if self.local:
            for group in (LOCAL, model.views[LOCAL].inside or ""):
                known_boxes(batch, group, self.module_name())

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no view would count, or a local one lies in none."""
        name = self.module_name()
        passes = {key: self.reference_pass(key) for key in _GROUPS}
        groups = [group for key, group in _GROUPS.items() if passes[key] in layout.passes]
        if self.local:
            self._check_local(layout, groups)
            groups.append(LOCAL)
        if self.on == "unmasked" and all(layout.masked(group) == 1 for group in groups):
            raise UserError(
                f"{name}.on = unmasked, but in every view of data.views.{' and '.join(groups)} "
                f"some patches are replaced by a mask token. Use {name}.on: all."
            )

    def _check_local(self, layout: Layout, groups: Sequence[str]) -> None:
        name, outer = self.module_name(), layout.views[LOCAL].inside
        if outer not in groups:
            raise UserError(
                f"{name}.local = True, but data.views.local.inside = {outer}: the reference sees "
                f"{' and '.join(groups) or 'no views'}. Set data.views.local.inside: "
                f"{(*groups, 'view')[0]}."
            )
        for mixed in (outer, LOCAL):
            if (mixer := layout.writers.get(f"{mixed}/pixels")) is not None:
                raise UserError(
                    f"{name}.local = True, but algorithms.{mixer} mixes the images of "
                    f"data.views.{mixed}. Use {name}.local: false."
                )

    def head(self, encoder: PatchEncoder, layout: Layout) -> Objective:
        """Return a new objective, which knows the layout."""
        objective: Any = self.objective
        made: Objective = objective(encoder, self, layout)
        return made


def on_grid(
    patches_RND: Tensor, old: tuple[int, int], new: tuple[int, int], how: Resize = "auto"
) -> Tensor:
    """Return a map of patches, (R, N, D), read at the cells of another grid of the same view.

    ``auto``: bilinear at the cells' centres; if whole numbers of old cells make a new one, their
    mean. ``bicubic``, without antialiasing: as DINOv3's code.
    """
    if old == new:
        return patches_RND
    picture = patches_RND.transpose(1, 2).unflatten(2, old)
    ratios = [before / after for before, after in zip(old, new, strict=True)]
    if how == "bicubic":
        resized = F.interpolate(picture, new, mode="bicubic", align_corners=False)
    elif all(ratio >= 2 and ratio.is_integer() for ratio in ratios):
        resized = F.interpolate(picture, new, mode="area")
    else:
        resized = F.interpolate(picture, new, mode="bilinear", align_corners=False)
    return resized.flatten(2).transpose(1, 2)


def in_box(
    patches_RND: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    outer_R4: Tensor,
    inner_R4: Tensor,
) -> Tensor:
    """Return maps of patches of views, (R, N, D), read bilinearly at the patches of views in them.

    Args:
        patches_RND: the maps.
        old: (rows, columns) of the maps.
        new: (rows, columns) of the views in them.
        outer_R4: boxes of the maps' views; x0 > x1 if mirrored.
        inner_R4: boxes of the views in them, in the same frame.
    """
    picture = patches_RND.transpose(1, 2).unflatten(2, old)
    rows_RH, columns_RW = box_centres(inner_R4, new)
    x0, y0, x1, y1 = outer_R4.unsqueeze(-1).unbind(1)
    rows_RH, columns_RW = (rows_RH - y0) / (y1 - y0), (columns_RW - x0) / (x1 - x0)
    points = [columns_RW[:, None].expand(-1, new[0], -1), rows_RH[..., None].expand(-1, -1, new[1])]
    places = 2 * torch.stack(points, dim=-1) - 1
    read = F.grid_sample(picture, places, padding_mode="border", align_corners=False)
    return read.flatten(2).transpose(1, 2)


def half_squared_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return 1 − cosine of vectors (…, D) as ½‖x/‖x‖ − y/‖y‖‖², exactly 0 if they are equal."""
    first, second = (F.normalize(each, dim=-1, eps=1e-12) for each in (first, second))
    return (first - second).square().sum(-1) / 2
