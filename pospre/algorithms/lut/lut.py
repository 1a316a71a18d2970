"""LUT: learning with unmasked tokens (Kim et al. 2024, arXiv 2310.13593).

A host masks and predicts one view. Beside it, the mean of the visible patches' outputs is pulled
towards that of a second, augmented and complete view, which a momentum teacher encodes: what the
encoder makes of few patches learns the context of all of them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from composer.utils import dist
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.lut.projector import Projector
from pospre.batch import EPOCH, HIDDEN, INDEX, VISIBLE, Batch, box_key, flip_key, image_key
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.needs import Needs
from pospre.model.objective import Objective, Outputs
from pospre.model.passes import EncoderPass
from pospre.model.question import Question
from pospre.model.teacher import Frozen, Momentum
from pospre.nn.initialisation import init_weights
from pospre.nn.masking import gather_tokens, num_visible, random_masking, slot_mask
from pospre.nn.vit import Encoder
from pospre.ranges import Ratio

Supervision = Literal["context", "tokens", "both"]
Distance = Literal["cosine", "infonce", "smooth_l1"]

STUDENT = {"view": "student", "second": "student/second"}
TEACHER = {"view": "teacher", "second": "teacher/second"}
WHOLE = {"view": "whole", "second": "whole/second"}


class BroaderContext(Objective):
    """Projector and predictor of the student, projector of the teacher, and their distance."""

    def __init__(self, encoder: Encoder, options: "LUT", left_out: bool) -> None:
        super().__init__()
        dim = encoder.embed_dim
        self.weight, self.num_prefix = options.weight, encoder.num_prefix_tokens
        self.online, self.supervision = options._online, options.supervision
        self.pool, self.steer, self.left_out = options.pool, options.steer, left_out
        self.distance, self.temperature = options.distance, options.temperature
        self.head = Projector(dim, options.hidden_dim, dim)
        self.predictor = Projector(dim, options.hidden_dim, dim)
        init_weights(self)
        self.teacher_head = Frozen(self.head)

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the projector and the teacher's."""
        return [(self.head, self.teacher_head.module)]

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return predictions and targets, S directions: ``context`` (S, 1, B, D).

        With patch-wise supervision also, or instead, ``tokens`` (S, B, K, D).
        """
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for group in self.online:
            other = "second" if group == "view" else "view"
            target = passes[TEACHER[other]]
            tokens, places = self._steered(passes, batch, group)
            if self.supervision != "tokens":
                pooled, mean = self._pool(tokens), self._pool(target)
                pairs.setdefault("context", []).append((pooled.unsqueeze(0), mean.unsqueeze(0)))
            if self.supervision != "context":
                same = target[:, self.num_prefix :]
                same = same if places is None else gather_tokens(same, places)
                pairs.setdefault("tokens", []).append((tokens[:, self.num_prefix :], same))
        outputs = {}
        for kind, directions in pairs.items():
            predicted = [self.predictor(self.head(student)) for student, _ in directions]
            outputs[f"predicted_{kind}"] = torch.stack(predicted)
            targets = [self.teacher_head(teacher) for _, teacher in directions]
            outputs[f"target_{kind}"] = torch.stack(targets)
        return outputs

    def _pool(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] if self.pool == "class_token" else tokens[:, self.num_prefix :].mean(1)

    def _steered(
        self, passes: dict[str, Tensor], batch: Batch, group: str
    ) -> tuple[Tensor, Tensor | None]:
        """Return the student's tokens that are taught, and their patches' places (None: all)."""
        if self.steer == "both":
            return passes[(WHOLE if self.left_out else STUDENT)[group]], None
        tokens, places = passes[STUDENT[group]], batch[f"{group}/visible"]
        if self.left_out:
            return tokens, places
        prefix, patches = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        return torch.cat([prefix, gather_tokens(patches, places)], dim=1), places

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean distance of predictions and targets (Eq. 2), in [0, 4] for cosine."""
        losses = [
            self._distance(outputs[name].float(), outputs[f"target_{kind}"].float())
            for kind in ("context", "tokens")
            if (name := f"predicted_{kind}") in outputs
        ]
        return torch.stack(losses).mean()

    def _distance(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return the distance of (S, G, n, D) embeddings; the n of a group are told apart."""
        if self.distance == "smooth_l1":
            return F.smooth_l1_loss(predicted, target)
        predicted, target = F.normalize(predicted, dim=-1), F.normalize(target, dim=-1)
        if self.distance == "cosine":
            return (2 - 2 * (predicted * target).sum(-1)).mean()
        with torch.autocast(predicted.device.type, enabled=False):
            logits = predicted @ target.mT / self.temperature
        return -logits.log_softmax(-1).diagonal(dim1=-2, dim2=-1).mean()

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the mean cosine ``similarity`` of predictions and targets."""
        kind = "tokens" if self.supervision == "tokens" else "context"
        predicted, target = outputs[f"predicted_{kind}"], outputs[f"target_{kind}"]
        similarity = F.cosine_similarity(predicted.detach().float(), target.float(), dim=-1)
        return {"similarity": similarity.mean()}


@dataclass(kw_only=True, eq=False)
class LUT(PretrainAlgorithm):
    """Broader-context supervision beside mae, simmim, droppos, or ijepa's context.

    Needs the view group ``second``, one view, in the published recipes cut as ``view`` is and then
    changed in colour. The heads have batch norm: the loss of a sample depends on the batch that
    one forward pass sees, and so (slightly) on the microbatch size and the number of ranks.

    Writes for ``symmetric`` the visible patches of the second view, none of which is visible in
    the first: ``second/visible``, and beside simmim ``second/masked``.

    Args:
        symmetric: false, the paper: the masked view is encoded once and learns from the second
            one. True, the published code: the second view is masked too and learns from the first.
        supervision: the mean over patches (``context``), every patch's own target (``tokens``), or
            ``both``, with one head. For single patches the second view is cut where the first one
            is, with its flip, and only its colours differ.
        pool: the mean of the ``patches``, or the ``class_token``.
        steer: the ``unmasked`` patches, or ``both``: masked ones too. A host that drops patches
            has no tokens of them in its encoder; there the view is encoded a second time, whole
            (the paper does not say how it did this).
        distance: ``cosine``, ``infonce`` (the other samples of this pass, or the image's other
            patches, are the negatives) or ``smooth_l1`` of the embeddings as they are.
        temperature: of ``infonce``; the paper does not say its own.
        target_mask_ratio: share of patches hidden from the teacher, in [0, 1).
        hidden_dim: width inside the heads.
        momentum_start: of the teacher at the beginning; None takes the teacher that another
            algorithm has brought.
        momentum_end: approached at the end, along a cosine.
        weight: α, factor of this loss in the total (published: 1 for S, 0.25 for B).
    """

    question: ClassVar[Question | None] = Question(
        "The model sees a few patches. Do they tell what the whole picture is about?",
        "similarity",
        "cosine of what the few predict and what a teacher sees in the whole",
    )

    symmetric: bool = False
    supervision: Supervision = "context"
    pool: Literal["patches", "class_token"] = "patches"
    steer: Literal["unmasked", "both"] = "unmasked"
    distance: Distance = "cosine"
    temperature: PositiveFloat = 0.2
    target_mask_ratio: Ratio = 0.0
    hidden_dim: PositiveInt = 4096
    momentum_start: float | None = 0.996
    momentum_end: float = 1.0
    weight: NonNegativeFloat = 0.25

    def needs(self, encoder: Encoder) -> Needs:
        """Return what must be there: two views, some patches of the first hidden by a host."""
        return Needs(
            views={"view": 1, "second": 1},
            patches="part",
            class_token="lut.pool = class_token" if self.pool == "class_token" else None,
            hint="Put it beside mae or another host that hides some by its mask_ratio, and list it "
            "after whatever chooses them.",
        )

    def attach(self, model: PretrainModel) -> None:
        """Add the teacher, the passes and the heads."""
        hidden = model.registry.hidden
        assert hidden is not None
        _check(self, model)
        for group in self._online:
            self._add_student(model, hidden.left_out, group)
        for group in self._targets:
            target = None
            if self.target_mask_ratio:
                target = f"{group}/target"
                model.registry.claim(target, "lut")
            model.registry.add_pass(TEACHER[group], "lut", EncoderPass(group, target, teacher=True))
        start = self.momentum_start
        model.add_teacher("lut", None if start is None else Momentum(start, self.momentum_end))
        model.add_objective("lut", BroaderContext(model.encoder, self, hidden.left_out))

    @property
    def _online(self) -> tuple[str, ...]:
        return ("view", "second") if self.symmetric else ("view",)

    @property
    def _targets(self) -> tuple[str, ...]:
        return ("second", "view") if self.symmetric else ("second",)

    @property
    def _same_crop(self) -> bool:
        return self.supervision != "context"

    def _add_student(self, model: PretrainModel, left_out: bool, group: str) -> None:
        registry = model.registry
        if self.steer == "both" and left_out:
            registry.add_pass(WHOLE[group], "lut", EncoderPass(group))
        elif group == "view":
            registry.join_pass("student", "lut")
        else:
            for key in ("visible",) if left_out else ("visible", "masked"):
                registry.claim(f"second/{key}", "lut")
            seen = "second/visible" if left_out else None
            registry.add_twin("student/second", "lut", "student", "second", seen)

    def couples_samples(self) -> str | None:
        """Return what looks at all samples of a forward at once."""
        return "the batch norms"

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Choose what of the second view is seen, and share the crop for patch-wise targets."""
        _check_batch(batch, model)
        if self._same_crop:
            for key in (image_key, flip_key, box_key):
                if key("view") in batch:
                    batch[key("second")] = batch[key("view")]
        if STUDENT["second"] in model.registry.passes:
            self._write_second(batch, model)
        if self.target_mask_ratio:
            for group in self._targets:
                batch[f"{group}/target"] = self._draw_target(batch, model, group)

    def _write_second(self, batch: Batch, model: PretrainModel) -> None:
        """Show of the second view as many patches as of the first, and none of the same places."""
        chosen = batch[HIDDEN][:, : batch[VISIBLE].shape[1]]
        batch["second/visible"] = chosen
        if "second/masked" in model.registry.writers:
            batch["second/masked"] = ~slot_mask(chosen, model.encoder.num_patches)

    def _draw_target(self, batch: Batch, model: PretrainModel, group: str) -> Tensor:
        rows, cols = model.grid(group)
        kept = num_visible(rows * cols, self.target_mask_ratio, key="lut.target_mask_ratio")
        keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, f"lut/target/{group}")
        return random_masking(keys, rows * cols, kept).visible


def _check(options: LUT, model: PretrainModel) -> None:
    """Raise ``UserError`` for options that cannot work together, or on these views."""
    if model.registry.mixes:
        raise UserError(
            f"algorithms.lut compares two views of one image, but "
            f"{model.registry.writers['view/pixels']} mixes images in 'view'. Turn its mixing off, "
            "or leave lut out."
        )
    num_visible(model.encoder.num_patches, options.target_mask_ratio, key="lut.target_mask_ratio")
    options.check_used("target_mask_ratio", not options._same_crop, "supervision")
    options.check_used("steer", options.pool == "patches", "pool")
    if options._same_crop and model.registry.place_source:
        raise UserError(
            f"lut.supervision = {options.supervision} cuts the second view where the first one "
            f"is, before '{model.registry.place_source}' reads its box. List lut before it."
        )
    if (options.symmetric or options._same_crop) and model.grid("second") != model.grid("view"):
        raise UserError(
            f"lut.symmetric = {options.symmetric} with lut.supervision = {options.supervision} "
            "needs views of one size. Give data.views.second the size of data.views.view."
        )
    if options.symmetric:
        _check_symmetric(options, model)


def _check_symmetric(options: LUT, model: PretrainModel) -> None:
    """Raise ``UserError`` unless the second view can show what the host hides of the first."""
    hidden, patches = model.registry.hidden, model.encoder.num_patches
    assert hidden is not None
    if not hidden.shuffled or hidden.visible is None:
        raise UserError(
            "lut.symmetric = true shows of the second view what the host hides of the first, by "
            f"ranks of a random mask, which '{hidden.owner}' does not draw. Use lut.symmetric = "
            "false."
        )
    whole = options.steer == "both" and hidden.left_out
    if patches < 2 * hidden.visible and not whole:
        raise UserError(
            f"lut.symmetric = true shows {hidden.visible} patches of each view at different "
            f"places, but of {patches} only {patches - hidden.visible} are left. Set "
            f"{hidden.owner}.mask_ratio to 0.5 or more, or lut.symmetric to false."
        )


def _check_batch(batch: Batch, model: PretrainModel) -> None:
    """Raise ``UserError`` for a single sample, which batch norm cannot train on."""
    if len(batch[INDEX]) == 1 and model.training and dist.get_world_size() == 1:
        raise UserError(
            "algorithms.lut has batch norm in its heads and cannot train on one sample at a time. "
            "Raise trainer.microbatch_size, or data.batch_size per device; no last microbatch may "
            "be left with one sample."
        )
