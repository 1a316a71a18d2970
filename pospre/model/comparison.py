"""Objectives that compare the trained encoder's tokens with those of the reference."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from pospre.batch import Batch, per_row
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.objective import Objective, Outputs
from pospre.model.uses import Pass
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import gather_tokens

Views = Literal["unmasked", "all"]
Resize = Literal["auto", "bicubic"]
_GROUPS = {"student": "view", "global": "global"}
"""The trained encoder's passes whose tokens are compared, and their view groups."""
COMPARED: Mapping[str, Pass] = {
    **{
        name: Pass(group, joins=True, or_all=True, optional=True) for name, group in _GROUPS.items()
    },
    **{
        f"reference/{name}": Pass(group, reference=True, optional=True)
        for name, group in _GROUPS.items()
    },
}
"""The passes to declare: those of a host, or over all patches, and the reference's beside them."""


class Pair(NamedTuple):
    """The tokens of a pass and of the reference in float32, for views of each of B samples.

    Attributes:
        student: (B·V, K, D) patches that the trained encoder got.
        target: (B·V, K, D') the reference's at the same places.
        student_prefix: (B·V, P, D) tokens before them, the class token first.
        target_prefix: (B·V, P', D').
        weight: (B, V), 1 for views that count, else 0.
    """

    student: Tensor
    target: Tensor
    student_prefix: Tensor
    target_prefix: Tensor
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
        laid = layout.passes
        self.targets = {
            name: key for name in _GROUPS if (key := options.reference_pass(name)) in laid
        }
        self.read = [*self.targets]
        self.visible = {name: laid[name].visible for name in self.read}
        self.grids = {name: layout.grid(_GROUPS[name]) for name in self.read}
        self.reference_grids = {
            name: layout.reference.grid_of(*layout.views[laid[key].group].shape)
            for name, key in self.targets.items()
        }
        keys = {name: f"{_GROUPS[name]}/masked" for name in self.read}
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
        return {name: torch.stack([each[name] for each in terms]).mean() for name in terms[0]}

    def _pairs(self, passes: dict[str, Tensor], batch: Batch) -> Iterator[Pair]:
        """Yield what to compare, for each pass."""
        for name in self.read:
            student, target = passes[name].float(), passes[self.targets[name]].float()
            patches = target[:, self.reference_prefix :]
            patches = on_grid(patches, self.reference_grids[name], self.grids[name], self.resize)
            visible = self.visible[name]
            if visible is not None:
                patches = gather_tokens(patches, per_row(batch[visible], len(patches)))
            yield Pair(
                student[:, self.prefix :],
                patches,
                student[:, : self.prefix],
                target[:, : self.reference_prefix],
                self._weight(name, len(student), batch),
            )

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
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def reference_pass(self, name: str) -> str:
        """Return the reference's pass beside the pass ``name``."""
        return f"reference/{name}"

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no view would count."""
        name = self.module_name()
        passes = {key: self.reference_pass(key) for key in _GROUPS}
        groups = [group for key, group in _GROUPS.items() if passes[key] in layout.passes]
        if self.on == "unmasked" and all(layout.masked(group) == 1 for group in groups):
            raise UserError(
                f"{name}.on = unmasked, but in every view of data.views.{' and '.join(groups)} "
                f"some patches are replaced by a mask token. Use {name}.on: all."
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


def half_squared_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return 1 − cosine of vectors (…, D) as ½‖x/‖x‖ − y/‖y‖‖², exactly 0 if they are equal."""
    first, second = (F.normalize(each, dim=-1, eps=1e-12) for each in (first, second))
    return (first - second).square().sum(-1) / 2
