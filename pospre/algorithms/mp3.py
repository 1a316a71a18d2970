"""MP3: masked patch position prediction (Zhai et al. 2022, arXiv 2207.07611).

The encoder gets the patches without positions and predicts the position of each. To make this
harder, only a random subset of them, the context, gives keys and values in every attention layer.
All of them are queries. There is no decoder: one linear layer classifies each patch into the N
positions. Fine-tuning adds new positions, or none. In speech a few patches keep their place. The
encoder forgets all others, under every position scheme.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre import draws
from pospre.batch import Batch, image_key, view_keys
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.needs import Needs
from pospre.model.objective import Outputs
from pospre.model.passes import EncoderPass, ForgottenPlaces
from pospre.model.position_task import Answers, PositionObjective, PositionTask, weighted_mean
from pospre.model.task_description import TaskDescription
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.masking import slot_mask
from pospre.nn.vit import Encoder
from pospre.ranges import Ratio


def num_context(num_patches: int, mask_ratio: float) -> int:
    """Return how many patches give keys and values: ``N − int(N·η)``."""
    return num_patches - int(num_patches * mask_ratio)


def draw_patches(batch: Batch, patches: int, count: int, seed: int, purpose: str) -> Tensor:
    """Return ``count`` of the patches of every view, all equally likely: int64 (B, V, count).

    A plain prefix of a random permutation. The paper's pseudo-code indexes the permutation with
    itself, which prefers the first patches, and takes N·η patches where its text takes N·(1−η).
    """
    keys = view_keys(batch, batch[image_key()].shape[1], seed, purpose)
    return draws.permutation(keys, patches)[..., :count]


def draw_known(batch: Batch, patches: int, count: int, seed: int) -> Tensor:
    """Return which ``count`` patches of every view keep their position: bool (B, V, N)."""
    known = draw_patches(batch, patches, count, seed, "mp3/positions")
    return slot_mask(known.flatten(0, 1), patches).unflatten(0, known.shape[:2])


class PatchPositions(PositionObjective):
    """The linear head over patch tokens, and its cross-entropy."""

    def __init__(self, encoder: Encoder, options: "MP3") -> None:
        super().__init__(encoder, options)
        self.count_shown = options.count_shown
        self.predict = nn.Linear(encoder.embed_dim, encoder.num_patches)
        init_trunc_normal(self)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``logits`` (B·V, N, N), and ``affinity`` (B·V, N) with attentive weights."""
        outputs = {"logits": self.predict(passes["student"][:, self.num_prefix :])}
        if "affinity" in passes:
            outputs["affinity"] = self.attentive_weights(passes["affinity"])
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over all patches that count, in the context or not."""
        log_prob = F.log_softmax(outputs["logits"].float(), dim=-1)
        cross_entropy = -(self.targets() * log_prob).sum(-1)
        weights = self.answers(outputs, batch).counted.float()
        if "affinity" in outputs:
            weights = weights * outputs["affinity"]
        return weighted_mean(cross_entropy, weights)

    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return the predicted positions of all patches. ``count_shown``: known ones count."""
        known = batch["mp3/known"].flatten(0, 1)
        places = torch.arange(known.shape[1], device=known.device).expand(known.shape)
        return Answers(outputs["logits"], places, known, ~known | self.count_shown)

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the top-1 ``accuracy``, also of the context and of the other patches alone."""
        found = self.answers(outputs, batch)
        accuracies = {"accuracy": found.accuracy()}
        if "mp3/context" in batch:
            context = slot_mask(batch["mp3/context"].flatten(0, 1), found.places.shape[1])
            accuracies["context_accuracy"] = found.accuracy(context)
            accuracies["masked_accuracy"] = found.accuracy(~context)
        return accuracies


@dataclass(kw_only=True, eq=False)
class MP3(PositionTask):
    """Predict the positions of all patches from the content of some, without a host.

    Writes ``mp3/context`` (B, V, M), the patches that give keys and values, unless all of them do.
    Also writes ``mp3/known``, bool (B, V, N), the patches that keep their position. Under every
    position scheme, its pass forgets the places of all others.

    Args:
        mask_ratio: η, share of patches outside the context, in [0, 1).
        position_rate: share of patches that keep their position, in [0, 1). The paper's speech
            model has 0.05, with ``encoder.positions: sincos``.
        count_shown: whether those count in loss and accuracy (the paper does not say).

    ``PositionTask`` has the others. The attentive weights, which are DropPos's, are here those of a
    pass in which all patches are context.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "A picture comes as a bag of patches. Does the model find the place of each?",
        "accuracy",
        "share of patches put in their place",
        "patch_position",
    )
    objective = PatchPositions

    mask_ratio: Ratio = 0.75
    position_rate: Ratio = 0.0
    count_shown: bool = False

    def needs(self, encoder: Encoder) -> Needs:
        """Return its requirements: views of which the encoder gets all patches."""
        return Needs(
            views={"view": None},
            patches="all",
            class_token=None if self.temperature is None else "mp3.temperature",
            hint="Use mp3 alone or with dinov2; or droppos, which goes with mae.",
        )

    def attach(self, model: PretrainModel) -> None:
        """Add the pass with context-only keys and the linear head."""
        _check(self, model)
        patches = model.encoder.num_patches
        # without masking there is nothing to gather
        context = "mp3/context" if num_context(patches, self.mask_ratio) < patches else None
        editors = ("mp3",) if model.encoder.positions.can_forget else ()
        model.registry.add_pass("student", "mp3", EncoderPass(context=context, places=editors))
        green = "patches framed in green are the context"
        model.registry.claim("mp3/context", "mp3", green=green)
        model.registry.claim("mp3/known", "mp3")
        if editors:
            model.places.named["mp3"] = ForgottenPlaces("mp3/known", None)
        if self.temperature is not None:
            model.registry.add_pass("affinity", "mp3", EncoderPass(grad=False, places=editors))
        model.add_objective("mp3", PatchPositions(model.encoder, self))

    def check_company(self, model: PretrainModel) -> None:
        """Warn if the encoder has positions that no pass with a gradient uses."""
        positions, passes = model.encoder.positions, model.registry.passes.values()
        known = self.num_known(model.encoder.num_patches)
        placed = [each for each in passes if each.has_grad and each.places != ("mp3",)]
        if positions.can_forget and not known and not placed:
            warnings.warn(
                f"mp3 hides all places, so that encoder.positions = {positions.name} is never used "
                "in training: fine-tune the encoder, or read its features with positions=none. "
                "Or set encoder.positions: none, or an mp3.position_rate.",
                stacklevel=2,
            )

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the context, and which patches keep their position."""
        patches = model.encoder.num_patches
        context = num_context(patches, self.mask_ratio)
        if context < patches:
            batch["mp3/context"] = draw_patches(batch, patches, context, model.seed, "mp3/context")
        batch["mp3/known"] = draw_known(batch, patches, self.num_known(patches), model.seed)

    def num_known(self, patches: int) -> int:
        """Return how many patches keep their position: N·rate, rounded."""
        return round(patches * self.position_rate)


def _check(options: MP3, model: PretrainModel) -> None:
    """Raise ``UserError`` for impossible options, or for another user of its pass."""
    encoder, key = model.encoder, f"mp3.position_rate = {options.position_rate}"
    patches, positions = encoder.num_patches, encoder.positions
    if "student" in model.registry.passes:
        raise UserError(
            "mp3 runs the pass 'student' over all patches, without their places and with keys from "
            f"its context alone, but {', '.join(model.registry.readers['student'])} runs it in "
            "another way. Use mp3 alone or with dinov2; or droppos, which goes with mae."
        )
    if patches < 2:
        raise UserError(
            f"mp3 needs two or more patches, but encoder.image_size = {list(encoder.image_size)} "
            f"with encoder.patch_size = {list(encoder.patch_size)} gives one. Use a larger image."
        )
    known = options.num_known(patches)
    if options.position_rate and not known:
        least = f"Use at least {1 / patches:.4f}, or 0."
        raise UserError(f"{key} gives none of {patches} patches its position. {least}")
    if known == patches and not options.count_shown:
        raise UserError(f"{key} gives all {patches} patches their position: none is left.")
    if known and not positions.can_forget:
        raise UserError(
            f"{key} gives some patches their position, but encoder.positions = {positions.name} "
            "has none to give. Set encoder.positions: sincos, or mp3.position_rate to 0."
        )
