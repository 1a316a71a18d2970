"""DINOv2: learning without labels from crops and masks (Oquab et al. 2023, arXiv 2304.07193).

A momentum teacher sees two global crops of an image. The student sees the same two, half of them
with blocks of patches masked, and several small local crops. All predictions are over K prototypes.
The student's class tokens predict the teacher's on another crop (DINO). Its masked patches predict
the teacher's patch at the same place (iBOT). KoLeo, or SIGReg, keeps its class tokens apart.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import Tensor, nn

from pospre.algorithms.dinov2 import losses
from pospre.algorithms.dinov2.losses import Centering, Targets
from pospre.algorithms.dinov2.masks import (
    NUM_CROPS,
    CropMasking,
    MaskShape,
    check_ratio,
    masked_slots,
)
from pospre.algorithms.dinov2.prototype_task import PrototypeOptions, TwoPrototypeTasks
from pospre.algorithms.lejepa.sigreg import SIGReg
from pospre.batch import Batch
from pospre.collectives import num_ranks
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import MaskedTokens
from pospre.model.progress import Progress
from pospre.model.task_description import TaskDescription
from pospre.model.teacher import Momentum
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.ranges import RatioRange, Share

MASK_KEY = "global/masked"
_READS = "algorithms.dinov2"
PASSES = {
    "global": Pass("global", class_token=_READS, edits_content=True),
    "local": Pass("local", class_token=_READS, needs_patches=False, optional=True),
    "teacher": Pass("global", class_token=_READS, teacher=True),
}
"""The student's passes over the crops, and the teacher's over the global ones."""


class PrototypeMatching(TwoPrototypeTasks):
    """The student's and the teacher's heads, and the losses."""

    def __init__(self, encoder: PatchEncoder, options: "DINOv2") -> None:
        super().__init__(encoder, options, options.weight)
        self.options = options
        self.class_targets = Targets(options.centering, options.num_prototypes)
        self.patch_targets = Targets(options.centering, options.num_prototypes)
        self.sigreg = SIGReg(options.head_bottleneck) if options.spreads("sigreg") else None

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return the cross-entropy of every prediction with its target, and the class tokens.

        ``class_entropy`` (B, S) of all crops; ``patch_entropy`` and ``patch_weight`` of the masked
        patches; ``classes`` (B, 2, D) of the global crops; ``sigreg``, if it is on; what
        ``metrics`` logs. Predictions over K prototypes and their targets are too large to keep
        until the loss.
        """
        masked = batch[MASK_KEY]
        bounds = self.options.masking.bounds(len(masked), masked.shape[-1])
        slots = masked_slots(masked, max(sum(bounds), 1))  # only padding if nothing is masked
        student, teacher = passes["global"], passes["teacher"]
        classes = student[:, 0].unflatten(0, (-1, NUM_CROPS))
        crops = classes
        if "local" in passes:
            local = passes["local"][:, 0].unflatten(0, (len(classes), -1))
            crops = torch.cat([classes, local], dim=1)
        class_logits, patch_logits = self.logits(crops, self.patches(student)[slots.patch])
        with torch.no_grad():
            targets, patch_targets = self.teacher_logits(
                teacher[:, 0].unflatten(0, (-1, NUM_CROPS)), self.patches(teacher)[slots.patch]
            )
            targets = self.class_targets(targets.flatten(0, 1), self.temperature)
            targets = targets.unflatten(0, (-1, NUM_CROPS))
            patch_targets = self.patch_targets(patch_targets, self.temperature, slots.weight)
        temperature = self.options.student_temperature
        spread: Outputs = {}
        if self.sigreg is not None:  # a second run of so few tokens costs little
            spread["sigreg"] = self.sigreg(self.head.mlp(classes).float().transpose(0, 1))
        return spread | {
            "class_entropy": losses.cross_view_entropy(class_logits, targets, temperature),
            "patch_entropy": losses.soft_cross_entropy(patch_logits, patch_targets, temperature),
            "patch_weight": slots.weight,
            "classes": classes,
            **losses.measures(class_logits, targets),
        }

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the weighted sum of the losses; SIGReg's weight is per sample of all ranks."""
        options, terms = self.options, self._terms(outputs)
        loss = options.dino_weight * terms["dino"] + options.ibot_weight * terms["ibot"]
        if "koleo" in terms:
            loss = loss + options.koleo_weight * terms["koleo"]
        if "sigreg" in terms:
            per_sample = terms["sigreg"] / (len(outputs["classes"]) * num_ranks())
            loss = loss + options.sigreg_weight * per_sample
        return loss

    def _terms(self, outputs: Outputs) -> Outputs:
        """Return the losses before their weights."""
        classes, weights = outputs["classes"], outputs["patch_weight"]
        terms = {
            "dino": losses.cross_view_loss(outputs["class_entropy"]),
            "ibot": losses.patch_loss(outputs["patch_entropy"], weights, NUM_CROPS * len(classes)),
        }
        if self.options.spreads("koleo"):
            spread = classes if self.options.koleo_crops == "both" else classes[:, :1]
            terms["koleo"] = torch.stack([losses.koleo(crop) for crop in spread.unbind(1)]).sum()
        return terms | {key: outputs[key] for key in ("sigreg",) if key in outputs}

    @torch.no_grad()
    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the losses before their weights, and measures of the class targets."""
        measured = {name: outputs[name] for name in ("agreement", "entropy")}
        return {**self._terms(outputs), **measured}


@dataclass(kw_only=True, eq=False)
class DINOv2(PretrainAlgorithm, PrototypeOptions):
    """The host that matches a student's crops and masked patches with a momentum teacher's.

    Needs the view group ``global`` with two views; ``local`` may have any number or be missing.
    Writes ``global/masked``, bool (B, 2, N). KoLeo couples all samples of a forward pass, Sinkhorn
    those of all ranks. Unlike MAE's, the loss therefore depends on the microbatch. The centre of
    ``centering`` moves once per step, by all samples.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Crops of one picture, large and small: does the model see that they are of one?",
        "agreement",
        "share of crops that student and teacher put to the same prototype",
    )
    objective = PrototypeMatching
    is_host: ClassVar[bool] = True

    dino_weight: NonNegativeFloat = 1.0
    """Weight of the loss over class tokens."""
    ibot_weight: NonNegativeFloat = 1.0
    """Weight of the loss over masked patches."""
    spread: Literal["koleo", "sigreg", "both"] = "koleo"
    """What keeps class tokens apart: KoLeo, or LeJEPA's SIGReg of the head's bottleneck, of each
    global crop (FINO), or both.
    """
    sigreg_weight: NonNegativeFloat = 0.05
    """Weight of SIGReg divided by the number of samples of all ranks, as FINO's code has it."""
    koleo_weight: NonNegativeFloat = 0.1
    """Weight of the KoLeo regulariser."""
    koleo_crops: Literal["both", "first"] = "both"
    """Global crops that KoLeo spreads: ``both``, summed (code), or only the ``first`` (paper)."""
    centering: Centering = "sinkhorn"
    """``sinkhorn``, or ``centering`` as in the published short configuration."""
    freeze_epochs: NonNegativeInt = 1
    """First epochs in which prototypes do not learn; an optimiser of your own must implement it."""
    momentum_start: float | None = 0.992
    """Momentum of the teacher at the first step; then it follows half a cosine."""
    momentum_end: float = 1.0
    """Momentum of the teacher at the last step."""
    mask_crop_rate: Share = 0.5
    """Share of global crops that are masked: 0.5 is one of each sample's two, 0 none (no iBOT)."""
    mask_ratio: RatioRange = (0.1, 0.5)
    """Range of the masked share of such a crop, drawn uniformly."""
    mask_shape: MaskShape = "blocks"
    """``blocks``; or ``cyclic`` (Franca, arXiv 2507.14137, with shares of 0.1–0.65): all but one
    rectangle, rolled around the grid, so that every place is masked equally often.
    """
    official: bool = False
    """As published, the rate holds over the (micro)batch instead of each sample, and shares are
    stratified over it.
    """
    weight: NonNegativeFloat = 1.0
    """Factor of the losses' sum in the total."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes over crops, and the teacher."""
        uniform = math.log(self.num_prototypes)
        return Uses(
            views={"global": NUM_CROPS},
            passes=PASSES,
            keys={MASK_KEY: "the content is masked"},
            masked={"global": self.mask_crop_rate},
            calibrates=("teacher",) if self.fit_heads else (),
            teacher=Momentum.given(self.momentum_start, self.momentum_end),
            couples=self._couples,
            entropies={"entropy": uniform},
            agreements={"agreement": ("dino", uniform)},
            frozen=dict.fromkeys(self.last_layers, self.freeze_epochs),
            half_residual=True,
        )

    def spreads(self, by: str) -> bool:
        """Return whether ``koleo`` or ``sigreg`` keeps class tokens apart."""
        return self.spread in (by, "both")

    @property
    def _couples(self) -> dict[str, bool]:
        return {
            "the targets": self.centering == "sinkhorn",
            "KoLeo": self.spreads("koleo") and self.koleo_weight > 0,
            "SIGReg": self.spreads("sigreg") and self.sigreg_weight > 0,
            "the sizes of masks": self.official,
        }

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` for options that cannot work together."""
        super().check_encoder(encoder)
        if not self.official and self.mask_crop_rate not in (0.0, 0.5, 1.0):
            raise UserError(
                f"dinov2.mask_crop_rate = {self.mask_crop_rate} masks no whole number of an "
                f"image's {NUM_CROPS} crops. Use 0.5, 1.0 or 0.0 (or dinov2.official: true for "
                "others)."
            )
        self.check_used("patch_head_bottleneck", self.separate_heads, "separate_heads")
        self.check_used("mask_shape", self.mask_crop_rate > 0, "mask_crop_rate")
        self.check_used("koleo_weight", self.spreads("koleo"), "spread")
        self.check_used("koleo_crops", self.spreads("koleo"), "spread")
        self.check_used("sigreg_weight", self.spreads("sigreg"), "spread")
        spread = self._couples["KoLeo"] or self._couples["SIGReg"]
        # without masked crops there are no patches to match
        if not (self.dino_weight or spread or self.ibot_weight * self.mask_crop_rate):
            raise UserError(
                f"dinov2.dino_weight = {self.dino_weight}, dinov2.ibot_weight = "
                f"{self.ibot_weight} and dinov2.koleo_weight = {self.koleo_weight} with "
                f"dinov2.mask_crop_rate = {self.mask_crop_rate} leave no loss. 1, 1 and 0.1 with "
                "0.5 are published; to serve masked_position only, set dinov2.weight to 0."
            )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no patch of the global crops would be masked."""
        check_ratio("dinov2", self.mask_ratio, layout.grid("global"))

    def content_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the mask token."""
        return MaskedTokens(nn.Parameter(torch.zeros(1, 1, encoder.embed_dim)), "masked")

    @property
    def masking(self) -> CropMasking:
        """How global crops are masked."""
        return CropMasking(self.mask_crop_rate, self.mask_ratio, self.official, self.mask_shape)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw which patches of the student's global crops are masked."""
        batch[MASK_KEY] = self.masking.draw(batch, model.grid("global"), model.seed)

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set the teacher's temperature, and draw SIGReg's slices."""
        objective = model.objectives.of(PrototypeMatching)
        objective.temperature.fill_(self.temperature(progress))
        if objective.sigreg is not None:
            objective.sigreg.draw(model.seed, progress)
