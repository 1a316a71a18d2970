"""I-JEPA: predicting features from one context (Assran et al. 2023, arXiv 2301.08243).

The encoder sees the tokens of one context block. A narrow predictor receives them, with a mask
token at every position of a target block. It regresses the features of these positions in the
teacher, a slowly following copy of the encoder that sees the whole image.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.ijepa.blocks import Blocks, check_blocks, draw_blocks, draw_official
from pospre.algorithms.ijepa.predictor import Predictor, PredictorKind, gather_blocks, nearness
from pospre.batch import EPOCH, HIDDEN, INDEX, VISIBLE, Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.progress import Progress
from pospre.model.task_description import TaskDescription
from pospre.model.teacher import Momentum, Shape
from pospre.model.uses import SEEN, Hides, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.masking import gather_tokens, others
from pospre.ranges import PositiveDepth, PositiveRange, RatioRange, ShareRange, Width
from pospre.schedules import linear

Loss = Literal["smooth_l1", "l2"]


class FeaturePrediction(Objective):
    """The predictor, and the distance to the teacher's layer-normalised features.

    Attributes:
        predictor: projects the context by a Linear, ``predictor.embed``.
        context_weight: λ of the context's loss at this step.
    """

    def __init__(
        self, encoder: PatchEncoder, options: "IJEPA", kind: PredictorKind = Predictor
    ) -> None:
        super().__init__()
        self.weight, self.kind = options.weight, options.loss
        self.num_prefix, self.grid = encoder.num_prefix_tokens, encoder.grid
        self.predictor = kind(
            encoder.positions,
            dim=options.predictor_dim,
            depth=options.predictor_depth,
            num_heads=options.heads(encoder),
        )
        self.predict = nn.Linear(options.predictor_dim, encoder.embed_dim)
        init_trunc_normal(self.predict)
        self.predict_context: nn.Linear | None = None
        if options.context_weight:
            self.predict_context = nn.Linear(options.predictor_dim, encoder.embed_dim)
            init_trunc_normal(self.predict_context)
        self.context_weight = nn.Buffer(torch.zeros(()), persistent=False)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``predicted`` and ``target`` features, each (B, M, T, D); ``context``, a loss."""
        visible, targets = batch[VISIBLE], batch["ijepa/targets"]
        seen, predict_context = passes["student"][:, self.num_prefix :], self.predict_context
        features = self.predictor(
            seen, visible, targets, batch, with_context=predict_context is not None
        )
        whole = passes["teacher"][:, self.num_prefix :].float()
        whole = F.layer_norm(whole, whole.shape[-1:])
        outputs = self.compared(features[:, :, -targets.shape[2] :], whole, targets)
        if predict_context is not None:
            context = predict_context(features[:, :, : visible.shape[1]])
            outputs["context"] = self.context_distance(context, whole, visible, targets)
        return outputs

    def context_distance(
        self, predicted_BMKD: Tensor, whole_BND: Tensor, visible_BK: Tensor, targets_BMT: Tensor
    ) -> Tensor:
        """Return the mean distance at the context's positions, each weighted by ``nearness``."""
        target = gather_tokens(whole_BND, visible_BK)[:, None].expand_as(predicted_BMKD)
        weight = nearness(visible_BK, targets_BMT, self.grid[1])
        distance = self.distance(predicted_BMKD, target, reduction="none")
        return (weight.unsqueeze(-1) * distance).mean()

    def compared(self, features: Tensor, whole_BND: Tensor, targets_BMT: Tensor) -> Outputs:
        """Return what the loss compares.

        Args:
            features: (B, M, T, d) of the predictor.
            whole_BND: the teacher's normalised features of the whole image.
            targets_BMT: the positions of the target blocks.
        """
        return {
            "predicted": self.predict(features),
            "target": gather_blocks(whole_BND, targets_BMT),
            "projection_norm": self.predictor.projection.detach().float().norm(),
            "token_norm": self.predictor.mask_token.detach().float().norm(),
        }

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean distance over targets and channels, and λ times the context's."""
        loss = self.target_loss(outputs)
        return loss + self.context_weight * outputs["context"] if "context" in outputs else loss

    def target_loss(self, outputs: Outputs) -> Tensor:
        """Return the mean distance over targets and channels."""
        return self.distance(outputs["predicted"], outputs["target"])

    def distance(self, predicted: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """Return the mean smooth-L1 (β = 1) or squared distance, in float32."""
        distance = F.mse_loss if self.kind == "l2" else F.smooth_l1_loss
        return distance(predicted.float(), target, reduction=reduction)

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return measures that the loss does not show.

        ``cosine`` is the similarity of predicted and true features, both less the mean true feature
        of the batch. ``spread`` is the standard deviation of the true features; 0 is collapse. The
        norms are those of the context's projection A and of the mask token m̃. ``context`` is the
        context's loss before its weight, if it has one.
        """
        predicted, target = (outputs[key].detach().float() for key in ("predicted", "target"))
        mean = target.mean((0, 1, 2))
        context = {key: outputs[key] for key in ("context",) if key in outputs}
        return context | {
            "cosine": F.cosine_similarity(predicted - mean, target - mean, dim=-1).mean(),
            "spread": (target - mean).square().mean((0, 1, 2)).sqrt().mean(),
            "projection_norm": outputs["projection_norm"],
            "token_norm": outputs["token_norm"],
        }


@dataclass(kw_only=True, eq=False)
class IJEPA(PretrainAlgorithm):
    """The host that predicts the teacher's features in target blocks.

    Writes ``view/visible`` (B, K), the context, ``view/hidden`` (B, N−K), and ``ijepa/targets``
    (B, M, T), the tokens of M target blocks; all sorted. The defaults are the published ones. The
    predictor does not see the class token, if the encoder has one (published: none).
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "The model sees one part of a picture. Does it know the features of the others?",
        "cosine",
        "cosine of predicted and true features, both less their mean",
        "prediction_heatmaps",
    )

    num_targets: PositiveInt = 4
    """M, target blocks per image, each predicted on its own."""
    target_scale: ShareRange = (0.15, 0.2)
    """Range of a target block's share of the patches."""
    target_ratio: PositiveRange = (0.75, 1.5)
    """Range of its height / width."""
    context_scale: ShareRange = (0.85, 1.0)
    """Range of the context block's share, before the targets are cut out of it."""
    target_tokens: PositiveInt | None = None
    """T; None: the smallest block (29 of 196). Larger blocks use T of their tokens."""
    context_tokens: PositiveInt | None = None
    """K; None: a quarter of the patches (49 of 196). Published masks are cut to the shortest on a
    device: on average 53 of 196 with 64 images, 68 of 256 with 128, 270 of 784 with 16, and 33, 44
    and 136 target tokens.
    """
    predictor_dim: Width = 384
    """Width of the predictor."""
    predictor_depth: PositiveDepth = 6
    """Number of blocks of the predictor (published: 6 for ViT-B, 12 for L and H)."""
    predictor_heads: PositiveInt | None = None
    """Attention heads of the predictor; None: as many as the encoder."""
    loss: Loss = "smooth_l1"
    """``smooth_l1`` as the published code, or ``l2``, the paper's squared distance."""
    context_weight: NonNegativeFloat = 0.0
    """λ of a second loss (V-JEPA 2.1, arXiv 2603.14482: 0.5): the predictor's outputs at the
    context's positions match the teacher there too, with the weight 1/√d at d cells from the
    target block. It has a Linear of its own. 0: off.
    """
    context_warmup: RatioRange = (0.1, 0.2)
    """Shares of the training between which λ rises from 0."""
    momentum_start: float | None = 0.996
    """Momentum of the teacher at the first step; None: another algorithm's teacher."""
    momentum_end: float = 1.0
    """Limit of the momentum at the last step."""
    momentum_shape: Shape = "linear"
    """Shape of the schedule between them."""
    official: bool = False
    """Draw masks as the published code: one number gives scale and ratio, the last row and column
    are never used, and masks are cut to the shortest of the batch. The (micro)batch shares their
    sizes, so they depend on it and counts vary; ``target_tokens`` and ``context_tokens`` must be
    null.
    """
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    objective = FeaturePrediction
    is_host: ClassVar[bool] = True

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes over the context and, in the teacher, the whole image."""
        visible = None if self.official else self.blocks(encoder).context_tokens
        return Uses(
            hides=Hides(visible, shuffled=False),
            passes={"student": Pass(over=SEEN), "teacher": Pass(teacher=True)},
            keys={"ijepa/targets": "the features are predicted"},
            teacher=Momentum.given(self.momentum_start, self.momentum_end, self.momentum_shape),
            widths={"predictor": (self.predictor_dim, self.heads(encoder))},
            couples={"the sizes of masks": self.official},
        )

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` for blocks that do not fit the grid."""
        super().check_encoder(encoder)
        for option in ("target_tokens", "context_tokens"):
            self.check_used(option, not self.official, "official")
        check_blocks(self.blocks(encoder), "ijepa", official=self.official)
        self.check_used("context_warmup", self.context_weight > 0, "context_weight")

    def heads(self, encoder: PatchEncoder) -> int:
        """Return the predictor's attention heads."""
        if self.predictor_heads is None:
            return encoder.positions.dims.num_heads
        return self.predictor_heads

    def blocks(self, encoder: PatchEncoder) -> Blocks:
        """Return the blocks to draw on the encoder's grid."""
        least = int(encoder.num_patches * self.target_scale[0])
        quarter = max(1, encoder.num_patches // 4)
        return Blocks(
            grid=encoder.grid,
            num_targets=self.num_targets,
            target_scale=self.target_scale,
            target_ratio=self.target_ratio,
            context_scale=self.context_scale,
            target_tokens=least if self.target_tokens is None else self.target_tokens,
            context_tokens=quarter if self.context_tokens is None else self.context_tokens,
        )

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the context and the target blocks."""
        keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, "ijepa/blocks")
        draw = draw_official if self.official else draw_blocks
        masks = draw(keys, self.blocks(model.encoder))
        batch[VISIBLE], batch["ijepa/targets"] = masks.context, masks.targets
        batch[HIDDEN] = others(masks.context, model.encoder.num_patches)

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set λ of the context's loss."""
        objective, (first, last) = model.objectives.of(FeaturePrediction), self.context_warmup
        done = (progress.step - first) / (last - first) if first < last else progress.step >= last
        objective.context_weight.fill_(linear(0.0, self.context_weight, done))
