"""DIET: every image is a class of its own, and the features say which one they are of.

arXiv 2302.10260, as DIET-CP continues from published weights
(arXiv 2509.06990): for about a thousand images, where methods with teachers and prototypes have too
few. Without a temperature the logits stay flat and the loss hardly falls, while the features change
all the same: measure them, and keep them near by ``gram``.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from pospre.algorithms.supervised.mixing import MixingAlgorithm, mixed_targets, smooth_entropy
from pospre.batch import INDEX, Batch, readable
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import pooled
from pospre.ranges import Share

_MOST_IMAGES = 100_000


class ImageRecognition(Objective):
    """One vector for each image, and the cross-entropy over all of them."""

    def __init__(self, encoder: PatchEncoder, options: "DIET") -> None:
        super().__init__()
        assert options.num_images is not None
        self.weight, self.smoothing, self.mixes = options.weight, options.smoothing, options.mixes
        self.prefix, self.has_class_token = encoder.num_prefix_tokens, encoder.has_class_token
        self.images = nn.Linear(encoder.embed_dim, options.num_images, bias=False)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``logits`` (B·V, n) of class tokens of length 1, or of means of patches."""
        tokens = pooled(passes["student"], self.prefix, self.has_class_token).float()
        return {"logits": self.images(F.normalize(tokens, dim=-1, eps=1e-12))}

    def _targets(self, batch: Batch, rows: int) -> Tensor:
        """Return the share of each image in the (mixed) views: (B·V, n)."""
        own = F.one_hot(batch[INDEX], self.images.out_features).float()
        if self.mixes and self.training:
            own = mixed_targets(own, batch["diet/share"])
        return own.repeat_interleave(rows // len(own), 0)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean cross-entropy; ln n if all images get the same logits."""
        logits = outputs["logits"].float()
        return smooth_entropy(logits, self._targets(batch, len(logits)), self.smoothing).mean()

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the ``accuracy``; of a mixed view the image with the larger share counts."""
        logits = outputs["logits"].detach()
        targets = self._targets(batch, len(logits)).argmax(-1)
        return {"accuracy": (logits.argmax(-1) == targets).float().mean()}


@dataclass(kw_only=True, eq=False)
class DIET(MixingAlgorithm):
    """Recognises which image of the data set a view is of.

    The ``index`` of an image is its class, so the head grows with the data set. If views are mixed,
    it writes ``diet/blend``, ``diet/box`` and ``diet/share``; the partner depends on the
    microbatch and the rank's share of the batch. In DIET-CP's code mixed batches have no smoothing.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Which picture of the data set is this a part of?",
        "accuracy",
        "share of views whose picture is recognised",
    )
    objective: ClassVar[type[Objective] | None] = ImageRecognition
    mixing: ClassVar[str] = "diet"

    num_images: Annotated[int, Field(ge=2)] | None = None
    """Number of images n; None: those of the training data."""
    smoothing: Share = 0.3
    """Share of the target that is spread over all images."""
    mixup: NonNegativeFloat = 1.0
    cutmix: NonNegativeFloat = 1.0
    mix_rate: Share = 0.8
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over the view, a host's or its own, and how images are mixed."""
        student = Pass(joins=True, or_all=True, needs_patches=not encoder.has_class_token)
        return Uses(
            views={"view": None},
            passes={"student": student},
            keys=self.mixing_keys(),
            predicts="content",
            couples={"the pairs that are mixed": self.mixes},
        )

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` without a number of images, or with too many."""
        super().check_encoder(encoder)
        if self.num_images is None:
            raise UserError("diet.num_images is None; give the number of images.")
        if self.num_images > _MOST_IMAGES:
            raise UserError(
                f"diet.num_images = {self.num_images}: the head would have as many rows. Use at "
                f"most {_MOST_IMAGES} images (data.label_fraction, data.labels), or dinov2."
            )

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Check the numbers of the images; draw how they are mixed."""
        self._check_numbers(batch[INDEX])
        super().write(batch, model)

    def _check_numbers(self, index_B: Tensor) -> None:
        """Raise ``UserError`` for images that the head has no row for."""
        index, count = readable(index_B), self.num_images
        if index is None or not len(index) or (index.min() >= 0 and index.max() < (count or 0)):
            return
        raise UserError(
            f"the batch has images from number {index.min():g} to {index.max():g}, but "
            f"diet.num_images = {count}. Number the images from 0, without gaps."
        )
