"""LUT: learning with unmasked tokens (Kim et al. 2024, arXiv 2310.13593).

A host masks and predicts one view. Beside it, the mean of the visible patches' outputs is pulled
towards that of a second, augmented and complete view, which a momentum teacher encodes: what the
encoder makes of few patches learns the context of all of them.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from composer.utils import dist
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.lut.projector import Projector
from pospre.batch import EPOCH, INDEX, Batch, box_key, flip_key, image_key
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, require_one_view
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.passes import EncoderPass
from pospre.model.question import Question
from pospre.model.teacher import Frozen, Momentum
from pospre.nn.initialisation import init_weights
from pospre.nn.masking import gather_tokens, num_kept, random_masking, slot_mask
from pospre.nn.vit import Encoder
from pospre.ranges import Ratio

Supervision = Literal["context", "tokens", "both"]
Distance = Literal["cosine", "infonce", "smooth_l1"]

STUDENT = {"view": "student", "second": "student/second"}
TEACHER = {"view": "teacher", "second": "teacher/second"}
WHOLE = {"view": "whole", "second": "whole/second"}


class BroaderContext(Objective):
    """Projector and predictor of the student, projector of the teacher, and their distance."""

    def __init__(self, encoder: Encoder, options: "LUT", dropping: bool) -> None:
        super().__init__()
        dim = encoder.embed_dim
        self.weight, self.num_prefix = options.weight, encoder.num_prefix_tokens
        self.online, self.supervision = options._online, options.supervision
        self.pool, self.steer, self.dropping = options.pool, options.steer, dropping
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
            return passes[(WHOLE if self.dropping else STUDENT)[group]], None
        tokens = passes[STUDENT[group]]
        if self.dropping:
            return tokens, batch[f"{group}/keep"]
        places = batch[f"{group}/visible"]
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
    the first: ``second/keep``, or beside simmim ``second/visible`` and ``second/masked``.

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

    def attach(self, model: PretrainModel) -> None:
        """Add the teacher, the passes and the heads; a no-op if they are there."""
        if "lut" in model.objectives:
            _check_late(model)
            return
        host = _host(model)
        _check(self, model)
        for group in self._online:
            self._add_student(model, host, group)
        for group in self._targets:
            keep = None
            if self.target_mask_ratio:
                keep = f"{group}/target"
                model.registry.claim(keep, "lut")
            model.registry.add_pass(TEACHER[group], "lut", EncoderPass(group, keep, teacher=True))
        start = self.momentum_start
        model.add_teacher("lut", None if start is None else Momentum(start, self.momentum_end))
        model.add_objective("lut", BroaderContext(model.encoder, self, host.keep is not None))

    @property
    def _online(self) -> tuple[str, ...]:
        return ("view", "second") if self.symmetric else ("view",)

    @property
    def _targets(self) -> tuple[str, ...]:
        return ("second", "view") if self.symmetric else ("second",)

    @property
    def _same_crop(self) -> bool:
        return self.supervision != "context"

    def _add_student(self, model: PretrainModel, host: EncoderPass, group: str) -> None:
        if self.steer == "both" and host.keep:
            model.registry.add_pass(WHOLE[group], "lut", EncoderPass(group))
        elif group == "view":
            model.registry.join_pass(STUDENT[group], "lut")
        else:
            keys = ("keep",) if host.keep else ("visible", "masked")
            for key in keys:
                model.registry.claim(f"second/{key}", "lut")
            keep = "second/keep" if host.keep else None
            twin = replace(host, group=group, keep=keep, needs_patches=True)
            model.registry.add_pass(STUDENT[group], "lut", twin)

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
        dropping = "view/keep" in batch
        shown = batch["view/keep" if dropping else "view/visible"].shape[1]
        chosen = batch["view/removed"][:, :shown]
        if dropping:
            batch["second/keep"] = chosen
            return
        batch["second/visible"] = chosen
        batch["second/masked"] = ~slot_mask(chosen, model.encoder.num_patches)

    def _draw_target(self, batch: Batch, model: PretrainModel, group: str) -> Tensor:
        rows, cols = model.grid(group)
        kept = num_kept(rows * cols, self.target_mask_ratio, key="lut.target_mask_ratio")
        keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, f"lut/target/{group}")
        return random_masking(keys, rows * cols, kept).keep


def _host(model: PretrainModel) -> EncoderPass:
    """Return the pass that sees some patches of ``view`` only.

    Raises:
        UserError: there is none.
    """
    host = model.registry.passes.get("student")
    if host is not None and (host.keep == "view/keep" or "view/visible" in model.registry.writers):
        return host
    others = ", ".join(model.objectives) or "nothing"
    raise UserError(
        "algorithms.lut teaches what a masked view shows of the whole, but before it there is "
        f"{others}, which hides no random patches of one view. Put it beside mae or another host "
        "that hides some by its mask_ratio, and list it after whatever chooses them."
    )


def _check(options: LUT, model: PretrainModel) -> None:
    """Raise ``UserError`` for options that cannot work together, or on these views."""
    require_one_view(model, "lut", "view")
    require_one_view(model, "lut", "second")
    if model.registry.mixes:
        raise UserError(
            f"algorithms.lut compares two views of one image, but "
            f"{model.registry.writers['view/pixels']} mixes images in 'view'. Turn its mixing off, "
            "or leave lut out."
        )
    num_kept(model.encoder.num_patches, options.target_mask_ratio, key="lut.target_mask_ratio")
    if options.target_mask_ratio and options._same_crop:
        raise UserError(
            f"lut.supervision = {options.supervision} needs the target of every patch, but "
            f"lut.target_mask_ratio = {options.target_mask_ratio} hides some. Set it to 0."
        )
    if options.pool == "class_token" and options.steer == "both":
        raise UserError(
            "lut.pool = class_token takes no mean that lut.steer = both could widen. Use "
            "lut.steer = unmasked."
        )
    if options.pool == "class_token" and not model.encoder.has_class_token:
        raise UserError(
            "lut.pool = class_token, but encoder.class_token is false. Use lut.pool = patches."
        )
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
    registry, patches = model.registry, model.encoder.num_patches
    if "view/removed" not in registry.shuffled:
        raise UserError(
            "lut.symmetric = true shows of the second view what the host hides of the first, by "
            f"ranks of a random mask, which '{registry.writers.get('view/removed')}' does not "
            "draw. Use lut.symmetric = false."
        )
    key = "view/keep" if "view/keep" in registry.writers else "view/visible"
    shown, host = registry.counts[key], registry.writers[key]
    whole = options.steer == "both" and key == "view/keep"
    if patches < 2 * shown and not whole:
        raise UserError(
            f"lut.symmetric = true shows {shown} patches of each view at different places, but of "
            f"{patches} only {patches - shown} are left. Set {host}.mask_ratio to 0.5 or more, or "
            "lut.symmetric to false."
        )


def _check_late(model: PretrainModel) -> None:
    """Raise ``UserError`` if what was attached after LUT changes positions in one view only."""
    first, second = (model.registry.passes.get(STUDENT[group]) for group in ("view", "second"))
    if first is not None and second is not None and first.places != second.places:
        late = ", ".join(sorted({*first.places} - {*second.places}))
        raise UserError(f"algorithms: with lut.symmetric = true list {late} before lut.")


def _check_batch(batch: Batch, model: PretrainModel) -> None:
    """Raise ``UserError`` for a single sample, which batch norm cannot train on."""
    if len(batch[INDEX]) == 1 and model.training and dist.get_world_size() == 1:
        raise UserError(
            "algorithms.lut has batch norm in its heads and cannot train on one sample at a time. "
            "Raise trainer.microbatch_size, or data.batch_size per device; no last microbatch may "
            "be left with one sample."
        )
