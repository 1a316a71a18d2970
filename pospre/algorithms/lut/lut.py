"""LUT: learning with unmasked tokens (Kim et al. 2024, arXiv 2310.13593).

A host masks and predicts one view. LUT also pulls the mean output of the visible patches towards
that of a second view, augmented and complete, which a momentum teacher encodes. Features of a few
patches thus learn the context of the whole image.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.lut import ablations
from pospre.algorithms.lut.projector import Projector, RankBatchNorm, check_rows
from pospre.batch import EPOCH, HIDDEN, INDEX, MASKED, VISIBLE, Batch, flip_key
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.refusals import check_unmixed
from pospre.model.task_description import TaskDescription
from pospre.model.teacher import Frozen, Momentum
from pospre.model.uses import ALL, SEEN, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_weights
from pospre.nn.masking import gather_tokens, num_visible, pooled, random_masking, slot_mask
from pospre.ranges import Ratio

STUDENT = {"view": "student", "second": "student/second"}
TEACHER = {"view": "teacher", "second": "teacher/second"}
WHOLE = {"view": "whole", "second": "whole/second"}
OTHER = {"view": "second", "second": "view"}


class BroaderContext(Objective):
    """Projector and predictor of the student, projector of the teacher, and their distance."""

    def __init__(self, encoder: PatchEncoder, options: "LUT", left_out: bool) -> None:
        super().__init__()
        dim = encoder.embed_dim
        self.weight, self.num_prefix = options.weight, encoder.num_prefix_tokens
        self.online, both = options._online, ("context", "tokens")
        self.kinds = both if options.supervision == "both" else (options.supervision,)
        self.pool, self.steer, self.left_out = options.pool, options.steer, left_out
        self.distance, self.temperature = options.distance, options.temperature
        self.head = Projector(dim, options.hidden_dim, dim)
        self.predictor = Projector(dim, options.hidden_dim, dim)
        init_weights(self)
        self.teacher_head = Frozen(self.head)

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the projector and the teacher's."""
        return [(self.head, self.teacher_head.module)]

    @property
    def _norms(self) -> list[RankBatchNorm]:
        return [*self.head.norms, *self.predictor.norms]

    def after_step(self) -> None:
        """Move the running statistics."""
        for norm in self._norms:
            norm.after_step()

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return predictions and targets, S directions: ``context`` (S, 1, B, D).

        With patch-wise supervision also, or instead, ``tokens`` (S, B, K, D).
        """
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {kind: [] for kind in self.kinds}
        for group in self.online:
            whole = passes[TEACHER[OTHER[group]]]
            tokens, places = self._taught(passes, batch, group)
            if "context" in pairs:
                pairs["context"].append((self._pool(tokens)[None], self._pool(whole)[None]))
            if "tokens" in pairs:
                same = ablations.same_patches(whole[:, self.num_prefix :], places)
                pairs["tokens"].append((tokens[:, self.num_prefix :], same))
        outputs = {}
        for norm in self._norms if self.training else ():
            norm.begin()
        for kind, directions in pairs.items():
            predicted = [self.predictor(self.head(student)) for student, _ in directions]
            outputs[f"predicted_{kind}"] = torch.stack(predicted)
            targets = [self.teacher_head(teacher) for _, teacher in directions]
            outputs[f"target_{kind}"] = torch.stack(targets)
        for norm in self._norms if self.training else ():
            norm.end(len(batch[INDEX]))
        return outputs

    def _pool(self, tokens: Tensor) -> Tensor:
        return pooled(tokens, self.num_prefix, self.pool == "class_token")

    def _taught(
        self, passes: dict[str, Tensor], batch: Batch, group: str
    ) -> tuple[Tensor, Tensor | None]:
        """Return the student's tokens that learn, and the places of their patches (None: all)."""
        if self.steer == "both":
            return passes[(WHOLE if self.left_out else STUDENT)[group]], None
        tokens, places = passes[STUDENT[group]], batch[f"{group}/visible"]
        if self.left_out:
            return tokens, places
        prefix, patches = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        return torch.cat([prefix, gather_tokens(patches, places)], dim=1), places

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean distance of predictions and targets, the D of Eq. 2."""
        losses = [
            self._distance(outputs[f"predicted_{kind}"].float(), outputs[f"target_{kind}"].float())
            for kind in self.kinds
        ]
        return torch.stack(losses).mean()

    def _distance(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return ‖ū − v̄‖² of normalised (S, G, n, D) embeddings, or another distance."""
        if self.distance != "cosine":
            return ablations.DISTANCES[self.distance](predicted, target, self.temperature)
        predicted, target = F.normalize(predicted, dim=-1), F.normalize(target, dim=-1)
        return (2 - 2 * (predicted * target).sum(-1)).mean()

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the mean cosine ``similarity`` of predictions and targets."""
        kind = self.kinds[0]
        predicted, target = outputs[f"predicted_{kind}"], outputs[f"target_{kind}"]
        similarity = F.cosine_similarity(predicted.detach().float(), target.float(), dim=-1)
        return {"similarity": similarity.mean()}


@dataclass(kw_only=True, eq=False)
class LUT(PretrainAlgorithm):
    """Broader-context supervision on top of mae, simmim, droppos, or ijepa's context.

    Needs the view group ``second``, one view, which published recipes cut like ``view`` and then
    change in colour. The heads have batch norm, so the loss of a sample depends on the batch of its
    forward pass. It thus depends slightly on the microbatch size and the number of ranks.

    Writes for ``symmetric`` the visible patches of the second view, none of which is visible in
    the first: ``second/visible``, and with simmim ``second/masked``. With a ``target_mask_ratio``,
    ``g/target``, the patches that the teacher sees.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "The model sees a few patches. Do they tell what the whole picture is about?",
        "similarity",
        "cosine of what the few predict and what a teacher sees in the whole",
    )

    objective = BroaderContext

    symmetric: bool = False
    """False is the paper (1.6 times MAE's operations): the masked view is encoded once and learns
    from the second one. True is the published code (2.65 times): the second view is masked too, at
    other places, and learns from the first.
    """
    supervision: ablations.Supervision = "context"
    """By the mean over patches (``context``), every patch's own target (``tokens``), or ``both``,
    with one head. For single patches the second view has the first one's crop and flip, and differs
    only in colours.
    """
    pool: Literal["patches", "class_token"] = "patches"
    """What is compared: the mean of the patches, or the class token."""
    steer: Literal["unmasked", "both"] = "unmasked"
    """The patches that learn: ``unmasked``, or ``both``. A host that drops patches has no tokens
    for masked ones; the complete view is then encoded a second time (the paper does not say how).
    """
    distance: ablations.Distance = "cosine"
    """``cosine``, ``infonce`` (other samples of the pass, or other patches, are negatives) or
    ``smooth_l1`` of the unnormalised embeddings.
    """
    temperature: PositiveFloat = 0.2
    """Of ``infonce``; the paper does not give it."""
    target_mask_ratio: Ratio = 0.0
    """Share of patches hidden from the teacher, in [0, 1)."""
    hidden_dim: PositiveInt = 4096
    """Width inside the heads, not of their output."""
    momentum_start: float | None = 0.996
    """Momentum of the teacher at the first step; None: another algorithm's."""
    momentum_end: float = 1.0
    """Limit of the momentum at the last step, along a cosine."""
    weight: NonNegativeFloat = 0.25
    """α, factor of this loss in the total (published: 1 for S, 0.25 for B and L)."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the student's and the teacher's passes over the two views."""
        return Uses(
            views={"view": 1, "second": 1},
            sees="part",
            passes=self._passes(),
            keys=dict.fromkeys(self._keys()),
            teacher=Momentum.given(self.momentum_start, self.momentum_end),
            couples={"the batch norms": True},
            hint="Combine it with mae or another host that hides some by its mask_ratio.",
        )

    def _passes(self) -> dict[str, Pass]:
        """Return the student's passes over its views, and the teacher's over the other ones."""
        read = "lut.pool = class_token" if self.pool == "class_token" else None
        is_whole = self.steer == "both"  # the student's tokens, too, unless it has none for them
        passes = {}
        for group in self._online:
            student = Pass(group, joins=True, class_token=read)
            if group == "second":  # no host runs it
                student = replace(student, over=SEEN, joins=False, twin_of="student")
            passes[STUDENT[group]] = replace(student, if_left_out=False if is_whole else None)
            if is_whole:
                passes[WHOLE[group]] = Pass(group, class_token=read, if_left_out=True)
            other = OTHER[group]
            over = f"{other}/target" if self.target_mask_ratio else ALL
            passes[TEACHER[other]] = Pass(other, over=over, teacher=True)
        return passes

    def _keys(self) -> Iterator[str]:
        """Yield what ``write`` writes."""
        if self.symmetric:
            yield from ("second/visible", "second/masked")
        if self.supervision != "context":
            yield flip_key("second")  # it becomes the first view's
        if self.target_mask_ratio:
            yield from (f"{OTHER[group]}/target" for group in self._online)

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` for a ratio that hides all, and for options without an effect."""
        super().check_encoder(encoder)
        num_visible(encoder.num_patches, self.target_mask_ratio, key="lut.target_mask_ratio")
        self.check_used("target_mask_ratio", self.supervision == "context", "supervision")
        self.check_used("steer", self.pool == "patches", "pool")

    def head(self, encoder: PatchEncoder, layout: Layout) -> BroaderContext:
        """Return the heads over the tokens that the host's masking leaves."""
        assert layout.hides is not None
        return BroaderContext(encoder, self, layout.hides.left_out)

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` for options that do not fit the two views, or the host's masks."""
        check_unmixed(layout, self.module_name())
        same_crop = self.supervision != "context"
        if (self.symmetric or same_crop) and layout.grid("second") != layout.grid("view"):
            raise UserError(
                f"lut.symmetric = {self.symmetric} with lut.supervision = {self.supervision} needs "
                "views of one size. Give data.views.second the size of data.views.view."
            )
        if self.symmetric:
            self._check_masks(layout)

    def _check_masks(self, layout: Layout) -> None:
        """Raise ``UserError`` unless the second view can show what the host hides of the first."""
        hides, hider, patches = layout.hides, layout.hider, layout.encoder.num_patches
        assert hides is not None
        if not hides.shuffled or hides.visible is None:
            raise UserError(
                "lut.symmetric = true shows the patches of the second view that the host hides in "
                f"the first. That needs a random mask, which '{hider}' does not draw. Use "
                "lut.symmetric = false."
            )
        if hides.left_out and MASKED in layout.writers:
            raise UserError(
                "lut.symmetric = true encodes the visible patches of both views alike, but "
                f"{hider} masks some of the first one's. Set {hider}.second_mask_ratio to 0, or "
                "lut.symmetric to false."
            )
        if patches < 2 * hides.visible and "student/second" in layout.passes:
            raise UserError(
                f"lut.symmetric = true shows {hides.visible} patches of each view at different "
                f"places, but of {patches} only {patches - hides.visible} are left. Set "
                f"{hider}.mask_ratio to 0.5 or more, or lut.symmetric to false."
            )

    @property
    def _online(self) -> tuple[str, ...]:
        return ("view", "second") if self.symmetric else ("view",)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Choose the visible part of the second view, and share the crop for patch-wise targets."""
        check_rows(len(batch[INDEX]), training=model.training)
        if self.supervision != "context":
            ablations.share_crop(batch)
        if STUDENT["second"] in model.layout.passes:
            self._write_masks(batch, model)
        for group in (OTHER[each] for each in self._online) if self.target_mask_ratio else ():
            patches, purpose = math.prod(model.grid(group)), f"lut/target/{group}"
            visible = num_visible(patches, self.target_mask_ratio, key="lut.target_mask_ratio")
            keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, purpose)
            batch[f"{group}/target"] = random_masking(keys, patches, visible).visible

    def _write_masks(self, batch: Batch, model: PretrainModel) -> None:
        """Show the same number of patches in the second view as in the first, at other places."""
        chosen = batch[HIDDEN][:, : batch[VISIBLE].shape[1]]
        batch["second/visible"] = chosen
        if model.layout.passes[STUDENT["second"]].visible is None:
            batch["second/masked"] = ~slot_mask(chosen, model.encoder.num_patches)
