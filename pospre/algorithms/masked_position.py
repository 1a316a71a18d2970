"""Masked position prediction (Intertwined, Sec. 3.3): the feature of a patch whose place is hidden.

On DINOv2, global crops whose content is not masked get their positions masked instead. The encoder
forgets the places of crosses of patches, and one learned vector replaces them. The student's
feature at such a patch predicts the teacher's feature at the same patch, which knows the position.
The prediction is over the prototypes of a separate head.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.dinov2.dinov2 import MASK_KEY as CONTENT_KEY
from pospre.algorithms.dinov2.dinov2 import DINOv2
from pospre.algorithms.dinov2.losses import Targets, patch_loss, soft_cross_entropy
from pospre.algorithms.dinov2.masks import (
    NUM_CROPS,
    CropMasking,
    block_masks,
    check_ratio,
    draw_counts,
    masked_slots,
)
from pospre.algorithms.dinov2.prototype_task import PrototypeTask
from pospre.batch import Batch, view_keys
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.calibration import centre
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs, Sampled
from pospre.model.passes import ForgottenPlaces
from pospre.model.progress import Progress
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.ranges import RatioRange

KNOWN = "global/known"


class PositionMatching(PrototypeTask):
    """The head, its teacher, and the loss over patches without position (Eq. 4)."""

    def __init__(self, encoder: PatchEncoder, host: DINOv2, options: "MaskedPosition") -> None:
        super().__init__(encoder, host, options.weight)
        self.host, self.mask_ratio = host, options.mask_ratio
        self.targets = Targets(host.centering, host.num_prototypes)

    def calibrate(self, sampled: Sampled) -> None:
        """Fit the head to patches, if the host's heads are fitted."""
        if self.host.fit_heads:
            centre(self.head.mlp, sampled.patches)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return the masked patches' ``cross_entropy`` with their targets, and their ``weight``.

        Also ``agreement``: how often the student predicts the teacher's prototype.
        """
        mask = ~batch[KNOWN]
        num_samples, _, patches = mask.shape
        most = int(patches * self.mask_ratio[1])
        slots = masked_slots(mask, num_free_crops(num_samples, self.host.masking) * most)
        logits = self.head(self.patches(passes["global"])[slots.patch])
        with torch.no_grad():
            targets = self.teacher_head(self.patches(passes["teacher"])[slots.patch])
            targets = self.targets(targets, self.temperature, slots.weight)
        masked = (slots.weight > 0).float()
        agree = (logits.argmax(-1) == targets.argmax(-1)) * masked
        return {
            "cross_entropy": soft_cross_entropy(logits, targets, self.host.student_temperature),
            "weight": slots.weight,
            "agreement": agree.sum() / masked.sum().clamp_min(1),
        }

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean over all global crops of each crop's mean over its masked patches."""
        num_crops = NUM_CROPS * len(batch[KNOWN])
        return patch_loss(outputs["cross_entropy"], outputs["weight"], num_crops)

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the ``agreement``: share of masked patches assigned to the teacher's prototype."""
        return {"agreement": outputs["agreement"].detach()}


@dataclass(kw_only=True, eq=False)
class MaskedPosition(PretrainAlgorithm):
    """Masks positions on those global crops of DINOv2 whose content is not masked.

    Writes ``global/known``, bool (B, 2, N). Prototypes, temperatures, centering and the initial
    freeze are those of ``dinov2``; the head is another one of the same size. The host determines
    which crops can be masked. With ``dinov2.mask_crop_rate`` 0.5, one global crop of each image has
    masked content and the other masked positions. With 0, both have masked positions. It works with
    all positions, in the image or in the field of ``crop_field``.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Patches on crosses lose their position. Does the model still know what is where?",
        "agreement",
        "share of these patches that student and teacher put to the same prototype",
    )
    objective = PositionMatching

    shape: Literal["cross", "box"] = "cross"
    """``cross``: a row and a column of patches, around drawn centres, always of the drawn count;
    ``box``: the blocks of DINOv2.
    """
    mask_ratio: RatioRange = (0.1, 0.5)
    """Range of the masked share of a crop's positions, drawn uniformly."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare that it reads DINOv2's passes, and hides places in one."""
        return Uses(
            views={},
            on="dinov2",
            passes={
                "global": Pass("global", joins=True, edits_places=True),
                "teacher": Pass("global", joins=True),
            },
            keys={KNOWN: "the position is known"},
            calibrates=("teacher",),
            predicts="content",  # the teacher's feature, which knows the place
            couples={"the targets": True},
            hint="Add dinov2, or use droppos, which needs no teacher.",
        )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no position of the global crops could be masked."""
        if self._host(layout).mask_crop_rate == 1:
            raise UserError(
                "masked_position masks the global crops that dinov2 leaves unmasked, but "
                "dinov2.mask_crop_rate = 1.0 leaves none. Use 0.5, or leave masked_position out."
            )
        check_ratio("masked_position", self.mask_ratio, layout.grid("global"))

    def _host(self, layout: Layout) -> DINOv2:
        host = layout.method("dinov2")
        assert isinstance(host, DINOv2)
        return host

    def head(self, encoder: PatchEncoder, layout: Layout) -> PositionMatching:
        """Return a head of the size of DINOv2's."""
        return PositionMatching(encoder, self._host(layout), self)

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that hides places."""
        return ForgottenPlaces(KNOWN, nn.Parameter(torch.zeros(1, 1, encoder.embed_dim)))

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw which positions of the student's global crops are masked."""
        grid, host = model.grid("global"), self._host(model.layout)
        keys = view_keys(batch, NUM_CROPS, model.seed, "masked_position/ratio")
        count = draw_counts(keys, self.mask_ratio, grid)
        count = torch.where(free_crops(batch[CONTENT_KEY], host.masking), count, 0)
        keys = view_keys(batch, NUM_CROPS, model.seed, f"masked_position/{self.shape}")
        if self.shape == "box":
            mask = block_masks(keys.flatten(), count.flatten(), grid).unflatten(0, keys.shape)
        else:
            order = cross_order(keys, grid)
            first = torch.arange(math.prod(grid), device=count.device) < count.unsqueeze(-1)
            mask = torch.zeros_like(first).scatter(-1, order, first)
        batch[KNOWN] = ~mask

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Use the host's temperature of the teacher."""
        objective = model.objectives.of(PositionMatching)
        objective.temperature.fill_(self._host(model.layout).temperature(progress))


def cross_order(keys: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the order in which crosses cover a grid: int64 (…, rows·cols); its first n are a mask.

    Crosses (one row and one column) around uniformly drawn centres are added one after the other.
    If only part of a cross still fits, the cells nearest to its centre go first (L1 distance, ties
    in random order). A mask of any count is then a prefix of this order, and no loop over counts is
    needed.

    Args:
        keys: int64 draw keys of any shape, see ``pospre.draws.sample_keys``.
        grid: (rows, columns).
    """
    rows, cols = grid
    # so many centres leave a given row without one once in e^8 draws
    num_crosses = 8 * max(rows, cols)
    draw = draws.uniform(keys, 2 * num_crosses + rows * cols)
    centre_row = (draw[..., :num_crosses] * rows).long()
    centre_col = (draw[..., num_crosses : 2 * num_crosses] * cols).long()
    cell = torch.arange(rows * cols, device=keys.device)
    row, col = cell // cols, cell % cols
    # the number of the cross that covers each cell first; cells that none covers come last
    turn = torch.minimum(_first(centre_row, rows)[..., row], _first(centre_col, cols)[..., col])
    by = turn.clamp_max(num_crosses - 1)
    distance = (centre_row.gather(-1, by) - row).abs() + (centre_col.gather(-1, by) - col).abs()
    rank = turn * (rows + cols) + distance
    return torch.argsort(rank + draw[..., 2 * num_crosses :].double(), dim=-1, stable=True)


def _first(drawn: Tensor, size: int) -> Tensor:
    """Return the first place (…, size) at which each number occurs among ``drawn`` (…, T)."""
    number = drawn.shape[-1]
    is_drawn = drawn.unsqueeze(-2) == torch.arange(size, device=drawn.device).unsqueeze(-1)
    index = torch.arange(number, device=drawn.device)
    return torch.where(is_drawn, index, number).amin(-1)


def num_free_crops(num_samples: int, masking: CropMasking) -> int:
    """Return how many global crops of this many samples have no content mask."""
    return NUM_CROPS * num_samples - int(NUM_CROPS * num_samples * masking.crop_rate)


def free_crops(content_mask_B2N: Tensor, masking: CropMasking) -> Tensor:
    """Return which global crops have no content mask, bool (B, 2), always equally many.

    (A mask of DINOv2 may come out empty: its crop then still counts as masked.)
    """
    amount = content_mask_B2N.sum(-1)
    # the published masks are distributed over the batch, ours within each sample
    pools = amount.flatten() if masking.stratified else amount
    free = num_free_crops(len(amount) if masking.stratified else 1, masking)
    rank = pools.argsort(dim=-1, stable=True).argsort(dim=-1)
    return (rank < free).view_as(amount)
