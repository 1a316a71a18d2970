"""MP3: masked patch position prediction (Zhai et al. 2022, arXiv 2207.07611).

The encoder gets the patches without positions and predicts the position of each. To make this
harder, only a random subset of them, the context, gives keys and values in every attention layer.
All of them are queries. There is no decoder: one linear layer classifies each patch into the N
positions. Fine-tuning adds new positions, or none. In speech a few patches keep their place. The
encoder forgets all others, under every position scheme.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.droppos import RelaxedPositions, smoothed_labels
from pospre.batch import Batch, image_key, view_keys
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import ForgottenPlaces
from pospre.model.position_task import Answers, warn_of_unused_positions
from pospre.model.progress import Progress
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.masking import slot_mask
from pospre.ranges import Ratio
from pospre.schedules import linear


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


class PatchPositions(RelaxedPositions):
    """The linear head over patch tokens, and its cross-entropy."""

    def __init__(self, encoder: PatchEncoder, options: "MP3") -> None:
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
        labels = smoothed_labels(self.distance_NN, self.sigma)
        cross_entropy = -(labels * log_prob).sum(-1)
        weights = self.answers(outputs, batch).counted.float()
        if "affinity" in outputs:
            weights = weights * outputs["affinity"]
        return (weights * cross_entropy).sum() / weights.sum().clamp_min(1e-12)

    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return the predicted positions of all patches. ``count_shown``: known ones count."""
        known = batch["mp3/known"].flatten(0, 1)
        places = torch.arange(known.shape[1], device=known.device).expand(known.shape)
        return Answers(outputs["logits"], places, known, ~known | self.count_shown)

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the top-1 ``accuracy``, also of the context and of the other patches alone."""
        answers = self.answers(outputs, batch)
        accuracies = {"accuracy": answers.score()}
        if "mp3/context" in batch:
            context = slot_mask(batch["mp3/context"].flatten(0, 1), answers.places.shape[1])
            accuracies["context_accuracy"] = answers.score(context)
            accuracies["masked_accuracy"] = answers.score(~context)
        return accuracies


@dataclass(kw_only=True, eq=False)
class MP3(PretrainAlgorithm):
    """Predict the positions of all patches from the content of some, without a host.

    Writes ``mp3/context`` (B, V, M), the patches that give keys and values, unless all of them do.
    Also writes ``mp3/known``, bool (B, V, N), the patches that keep their position. Under every
    position scheme, its pass forgets the places of all others.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "A picture comes as a bag of patches. Does the model find the place of each?",
        "accuracy",
        "share of patches put in their place",
        "patch_position",
    )
    objective = PatchPositions

    mask_ratio: Ratio = 0.75
    """η, share of patches outside the context, in [0, 1) (0.5 for 64 patches of CIFAR, 0.8 for
    Tiny-ImageNet).
    """
    position_rate: Ratio = 0.0
    """Share of patches that keep their position; 0.05 in the paper's speech model, with sincos."""
    count_shown: bool = False
    """Count these in loss and accuracy (the paper does not say)."""
    sigma_start: NonNegativeFloat = 0.0
    """σ0, initial width of DropPos's label smoothing, in patches; 0 is one-hot."""
    sigma_end: NonNegativeFloat = 0.0
    """σT, final width; it changes linearly in steps."""
    distance: Literal["squared", "euclid"] = "squared"
    """In the smoothing's exponent: ``squared`` or ``euclid``."""
    temperature: PositiveFloat | None = None
    """τ of DropPos's attentive weights, from a pass in which all patches are context; None: equal
    ones. Their sum is one forward pass's.
    """
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over all patches, with keys from the context alone."""
        return Uses(
            views={"view": None},
            sees="all",
            passes=self._passes(encoder),
            keys={"mp3/context": "the context", "mp3/known": None},
            predicts="places",
            couples={"the weights of patches": self.temperature is not None},
            hint="Use mp3 alone or with dinov2; or droppos, which goes with mae.",
        )

    def _passes(self, encoder: PatchEncoder) -> dict[str, Pass]:
        """Return the pass over the patches, and that of the attentive weights if they are on."""
        edits, patches = encoder.positions.can_forget, encoder.num_patches
        # without masking there is nothing to gather
        context = "mp3/context" if num_context(patches, self.mask_ratio) < patches else None
        passes = {"student": Pass(context=context, edits_places=edits)}
        if self.temperature is not None:
            passes["affinity"] = Pass(grad=False, class_token="mp3.temperature", edits_places=edits)
        return passes

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that forgets unknown places."""
        return ForgottenPlaces("mp3/known", None)

    def check(self, layout: Layout) -> None:
        """Refuse other readers of its pass; warn of positions that no pass with a gradient uses."""
        name = self.module_name()
        others = [each for each in layout.passes["student"].readers if each != name]
        if others:
            raise UserError(
                f"mp3 encodes all patches without their places, and {', '.join(others)} would get "
                "the same tokens. Use mp3 alone or with dinov2; or droppos, which goes with mae."
            )
        if not self.num_known(layout.encoder.num_patches):
            warn_of_unused_positions(name, layout, "none, or an mp3.position_rate")

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` if there is nothing to predict, or no position to give."""
        super().check_encoder(encoder)
        patches, positions = encoder.num_patches, encoder.positions
        known, key = self.num_known(patches), f"mp3.position_rate = {self.position_rate}"
        if patches < 2:
            raise UserError(
                f"mp3 needs two or more patches, but encoder.image_size = "
                f"{list(encoder.image_size)} with encoder.patch_size = {list(encoder.patch_size)} "
                "gives one. Use a larger image."
            )
        if self.position_rate and not known:
            least = f"Use at least {1 / patches:.4f}, or 0."
            raise UserError(f"{key} gives none of {patches} patches its position. {least}")
        if known == patches and not self.count_shown:
            raise UserError(f"{key} gives all {patches} patches their position: none is left.")
        if known and not positions.can_forget:
            raise UserError(
                f"{key} gives some patches their position, but encoder.positions = "
                f"{positions.name} has none to give. Set encoder.positions: sincos, or "
                "mp3.position_rate to 0."
            )

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the context, and which patches keep their position."""
        patches = model.encoder.num_patches
        context = num_context(patches, self.mask_ratio)
        if context < patches:
            batch["mp3/context"] = draw_patches(batch, patches, context, model.seed, "mp3/context")
        batch["mp3/known"] = draw_known(batch, patches, self.num_known(patches), model.seed)

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set σ, linear from σ0 to σT in steps."""
        sigma = model.objectives.of(PatchPositions).sigma
        sigma.fill_(linear(self.sigma_start, self.sigma_end, progress.step))

    def num_known(self, patches: int) -> int:
        """Return how many patches keep their position: N·rate, rounded."""
        return round(patches * self.position_rate)
