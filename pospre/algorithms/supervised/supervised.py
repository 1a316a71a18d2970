"""Classification of whole images: training from labels, and fine-tuning of pre-trained encoders.

The recipes of DeiT (Touvron et al. 2021, arXiv 2012.12877) and of MAE's fine-tuning (He et al.
2022, arXiv 2111.06377, table 9), by which the papers here measure their encoders.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from pospre.algorithms.supervised.head import Head, checked_labels
from pospre.algorithms.supervised.mixing import MixingAlgorithm, mixed_targets, smooth_entropy
from pospre.batch import LABEL, Batch
from pospre.errors import UserError
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.task_description import TaskDescription
from pospre.model.teacher import Frozen
from pospre.model.uses import ALL, SEEN, Hides, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import PatchMasking, pooled
from pospre.ranges import Ratio, Share

Pooling = Literal["cls", "mean"]


class Classification(Objective):
    """The head over pooled tokens, and the cross-entropy with soft targets."""

    def __init__(
        self, encoder: PatchEncoder, options: "Supervised", *, is_averaged: bool = False
    ) -> None:
        super().__init__()
        assert options.num_classes is not None
        self.weight, self.num_prefix = options.weight, encoder.num_prefix_tokens
        self.pooling, self.kind = options.pooling, options.loss
        self.smoothing = options.label_smoothing
        self.num_classes, self.mixes = options.num_classes, options.mixes
        self.head = Head(encoder, options.num_classes, options.head_init)
        self.teacher_head = Frozen(self.head) if is_averaged else None

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the head with its copy, if there is one."""
        return [] if self.teacher_head is None else [(self.head, self.teacher_head.module)]

    def timm_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the head under timm's names, and its arguments for ``timm.create_model``."""
        return self.head.timm_state(of_mean=self.pooling == "mean")

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``logits`` (B, C)."""
        tokens = pooled(passes["student"], self.num_prefix, self.pooling == "cls")
        return {"logits": self.head(tokens)}

    def _targets(self, batch: Batch) -> Tensor:
        """Return the share of each class in the (mixed) image: (B, C)."""
        own = F.one_hot(batch[LABEL], self.num_classes).float()
        if not (self.mixes and self.training):
            return own
        return mixed_targets(own, batch["supervised/share"])

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the cross-entropy, averaged over samples (and over classes if binary)."""
        logits, targets = outputs["logits"].float(), self._targets(batch)
        if self.kind == "bce":
            return F.binary_cross_entropy_with_logits(logits, (targets > 0).float())
        return smooth_entropy(logits, targets, self.smoothing).mean()

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return top-1 ``accuracy``; of a mixed image the class with the larger share counts."""
        predicted = outputs["logits"].detach().argmax(-1)
        return {"accuracy": (predicted == self._targets(batch).argmax(-1)).float().mean()}


@dataclass(kw_only=True, eq=False)
class Supervised(MixingAlgorithm):
    """The host that predicts an image's class.

    If images are mixed, writes ``supervised/blend``, ``supervised/box`` and ``supervised/share``.
    The partner depends on the microbatch and the rank's share of the batch, everything else on the
    sample. With a ``mask_ratio``, writes ``view/visible`` and ``view/hidden``.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Which class does a picture belong to?",
        "accuracy",
        "top-1 on the training pictures, as they are mixed",
        "accuracy",
    )

    num_classes: Annotated[int, Field(ge=2)] | None = None
    """Number of classes; None: those of the training data."""
    pooling: Pooling = "cls"
    """What is classified: the class token, or the mean of the patch tokens (Swin's merged ones).
    MAE's fine-tuning is ``mean`` with ``encoder.final_norm: false``: the head then normalises the
    mean.
    """
    loss: Literal["ce", "bce"] = "ce"
    """``ce``: softmax cross-entropy; ``bce``: a binary one per class, where all mixed ones count as
    present (DeiT III).
    """
    label_smoothing: Share = 0.0
    """Share of the target spread over all classes (published: 0.1)."""
    mixup: NonNegativeFloat = 0.0
    """α of Mixup's Beta(α, α); 0 is off (published: 0.8)."""
    cutmix: NonNegativeFloat = 0.0
    """α of CutMix's; 0 is off (published: 1)."""
    head_init: NonNegativeFloat = 0.02
    """Standard deviation of the head's weights; 2e-5 in MAE's fine-tuning."""
    mask_ratio: Ratio = 0.0
    """Share of patches removed in training, so that position algorithms can join; not for Swin."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    objective = Classification
    mixing: ClassVar[str] = "supervised"
    is_host: ClassVar[bool] = True
    takes_merged_patches: ClassVar[bool] = True

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over the image, and how images are mixed."""
        masking = PatchMasking.by_ratio("supervised", encoder.grid, self.mask_ratio)
        hides = Hides.by(masking) if self.mask_ratio else None
        read = "supervised.pooling = cls" if self.pooling == "cls" else None
        over = ALL if hides is None else SEEN
        return Uses(
            hides=hides,
            passes={"student": Pass(over=over, class_token=read, needs_patches=read is None)},
            keys=self.mixing_keys(),
            couples={"the pairs that are mixed": self.mixes},
        )

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` without a number of classes, and for options without an effect."""
        super().check_encoder(encoder)
        if self.num_classes is None:
            raise UserError("supervised.num_classes is None; give the number of classes.")
        self.check_used("label_smoothing", self.loss == "ce", "loss")
        merges = encoder.patches_per_token > 1
        self.check_used("mask_ratio", not merges, "swin_tiny, trained on whole images here")

    def head(self, encoder: PatchEncoder, layout: Layout) -> Classification:
        """Return the class head; a teacher that averages follows it, too."""
        return Classification(encoder, self, is_averaged=layout.averages)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Check the labels; draw how samples are mixed."""
        batch[LABEL] = checked_labels(batch[LABEL], self.num_classes)
        super().write(batch, model)
