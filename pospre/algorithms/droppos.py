"""DropPos: reconstructing dropped positions (Wang et al. 2023, arXiv 2309.03576).

Keeps a random quarter of the patches and drops the positions of most of them: as published, one
learned vector replaces the position embedding. Each such patch is classified into one of the N
positions of the grid. Two relaxations help. Labels are smoothed over neighbouring positions, with a
width that shrinks to zero. Every patch is weighted by its similarity to the class token.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.batch import EPOCH, INDEX, VISIBLE, Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import ExchangedPlaces, ForgottenPlaces
from pospre.model.position_task import Answers, PositionObjective
from pospre.model.progress import Progress
from pospre.model.task_description import TaskDescription
from pospre.model.uses import ALL, SEEN, Hides, Pass, Uses
from pospre.nn.block import DecoderBlocks
from pospre.nn.encoder_interface import PatchEncoder, split_tokens
from pospre.nn.grid import grid_distances
from pospre.nn.initialisation import init_weights, token_parameter
from pospre.nn.masking import PatchMasking, Sampling, slot_mask
from pospre.ranges import Depth, PositiveShare, Ratio, Width
from pospre.schedules import linear


def smoothed_labels(distance_NN: Tensor, sigma: Tensor, *, official: bool = False) -> Tensor:
    """Return the target of each true position, a row of (N, N) with sum 1 (Eq. 5).

    The weight of a position at distance d is exp(−d/σ²). ``official`` normalises columns, a mistake
    of the published code. In float32, σ below 0.05 patches gives one-hot rows.
    """
    exponent = -distance_NN / sigma.clamp_min(0.05).square()
    return torch.softmax(exponent, dim=0 if official else 1)


class RelaxedPositions(PositionObjective):
    """A classification of positions with the two relaxations (Sec. 3.2), which MP3 has, too."""

    def __init__(self, encoder: PatchEncoder, options: Any) -> None:
        super().__init__(encoder)
        self.weight, self.temperature = options.weight, options.temperature
        self.sigma = nn.Buffer(torch.tensor(options.sigma_start), persistent=False)
        distance_NN = grid_distances(*encoder.grid, squared=options.distance == "squared")
        self.distance_NN = nn.Buffer(distance_NN, persistent=False)

    def attentive_weights(self, tokens: Tensor, visible_BK: Tensor | None = None) -> Tensor:
        """Return each patch's similarity to the class token (Eq. 9): (B, K), sum 1, no gradient.

        The published code renormalises a softmax over all patches, which is the same.
        """
        tokens = tokens.detach().float()
        similarity = F.cosine_similarity(tokens[:, :1], tokens[:, self.num_prefix :], dim=-1)
        if visible_BK is not None:
            similarity = torch.gather(similarity, 1, visible_BK)
        return torch.softmax(similarity / self.temperature, dim=-1)


class PositionClassification(RelaxedPositions):
    """The position decoder, and the weighted cross-entropy with smoothed labels."""

    def __init__(self, encoder: PatchEncoder, options: "DropPos") -> None:
        super().__init__(encoder, options)
        self.official, self.ignore_confident = options.official, options.ignore_confident
        self.affinity, self.per_token = options.affinity, encoder.patches_per_token
        dim = options.decoder_dim
        self.embed = nn.Linear(encoder.embed_dim, dim * self.per_token)
        self.blocks = DecoderBlocks(dim, options.decoder_depth, options.decoder_heads)
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.predict = nn.Linear(dim, encoder.num_patches)
        init_weights(self)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``logits`` (B, K, N), and ``affinity`` (B, K) if attentive weights are on."""
        decoded = self.blocks(split_tokens(self.embed(passes["student"]), self.per_token))
        outputs = {"logits": self.predict(self.norm(decoded[:, self.num_prefix :]))}
        whole = passes.get("teacher" if self.affinity == "teacher" else "affinity")
        if whole is not None:
            seen = None if self.affinity == "visible" else batch[VISIBLE]  # there it has only them
            outputs["affinity"] = self.attentive_weights(whole, seen)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return Σ w·CE / Σ w over the patches without position (Eq. 8); 0 if all w are 0."""
        true = batch[VISIBLE]
        labels = smoothed_labels(self.distance_NN, self.sigma, official=self.official)
        log_prob = F.log_softmax(outputs["logits"].float(), dim=-1)
        cross_entropy = -(labels[true] * log_prob).sum(-1)
        weights = (~batch["droppos/known"]).float()
        if self.ignore_confident:
            confidence = log_prob.detach().gather(2, true.unsqueeze(-1)).squeeze(-1).exp()
            weights = weights * (confidence < labels.diagonal()[true])
        if "affinity" in outputs:
            weights = weights * outputs["affinity"]
        return (weights * cross_entropy).sum() / weights.sum().clamp_min(1e-12)

    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return the predicted positions of the visible patches; those without position count."""
        known = batch["droppos/known"]
        return Answers(outputs["logits"], batch[VISIBLE], known, ~known)


@dataclass(kw_only=True, eq=False)
class DropPos(PretrainAlgorithm):
    """Predict the positions of visible patches, alone or with a host that masks.

    Writes ``droppos/order`` (B, K), the visible slots in random order, and ``droppos/known``, bool
    (B, K): the first of that order keep their position. Alone it also writes ``view/visible`` and
    ``view/hidden``. Beside MAE (multi-task) both share one pass over MAE's visible patches.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Patches of a picture lose their position. Does the model put them back in their place?",
        "accuracy",
        "share of these patches put in their place",
        "position_grid",
    )
    objective = PositionClassification
    takes_merged_patches: ClassVar[bool] = True

    mask_ratio: Ratio | None = None
    """γ, share of patches removed, in [0, 1). None: the host's, or 0.75 alone."""
    position_mask_ratio: PositiveShare = 0.75
    """γ_pos, share of visible patches that lose their position, in (0, 1]."""
    sigma_start: NonNegativeFloat = 1.0
    """σ0, initial width of the label smoothing, in patches; 0 is one-hot."""
    sigma_end: NonNegativeFloat = 0.0
    """σT, final width; it changes linearly in steps."""
    distance: Literal["squared", "euclid"] = "squared"
    """In the smoothing's exponent: ``squared`` as in the code, or ``euclid`` as in Eq. 5."""
    temperature: PositiveFloat | None = 0.1
    """τ of the attentive weights, whose sum is one forward pass's, as published; None: equal ones.
    """
    affinity: Literal["full", "visible", "teacher"] = "full"
    """The patches behind these weights. ``full``: the whole image (published). ``visible``: the
    visible patches with all their positions, at a quarter of the cost. ``teacher``: the whole image
    in another algorithm's teacher (that of ijepa is free).
    """
    position_token: Literal["learned", "zeros", "wrong"] = "learned"
    """What replaces a dropped position: one ``learned`` vector, ``zeros``, or ``wrong``: the
    image's dropped positions in random order (published: one order per batch). In attention, a
    dropped position has angle 0 and bias 0 besides.
    """
    sampling: Sampling = "random"
    """Of the visible patches when alone: ``random``, or ``uniform``, one of every 2×2 (UM-MAE)."""
    ignore_confident: bool = False
    """Leave out patches whose predicted probability has reached its target."""
    decoder_dim: Width = 512
    """Width of the position decoder, which has no position embedding."""
    decoder_depth: Depth = 2
    """Number of blocks of the decoder."""
    decoder_heads: PositiveInt = 16
    """Attention heads of the decoder."""
    official: bool = False
    """As published: labels normalised over columns; σ decayed per epoch, never to σT."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total (published with MAE: 0.05 for B, 0.1 for L)."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over visible patches, whose places it drops, and that of the weights."""
        ratio = 0.75 if self.mask_ratio is None else self.mask_ratio
        masking = PatchMasking.by_ratio("droppos", encoder.grid, ratio, self.sampling)
        return Uses(
            hides=Hides.by(masking, unless_host=True, options=("mask_ratio", "sampling")),
            sees="shown",
            passes=self._passes(),
            keys={"droppos/order": None, "droppos/known": "keep their position"},
            predicts="places",
            widths={"decoder": (self.decoder_dim, self.decoder_heads)},
            couples={"the weights of patches": bool(self.temperature or self.ignore_confident)},
            hint="Use droppos alone or with mae.",
        )

    def _passes(self) -> dict[str, Pass]:
        """Return the pass over visible patches, and that of the attentive weights if on."""
        passes, reads = {"student": Pass(over=SEEN, edits_places=True)}, "droppos.temperature"
        if self.temperature is not None and self.affinity == "teacher":
            passes["teacher"] = Pass(teacher=True, class_token=reads)
        elif self.temperature is not None:
            over = SEEN if self.affinity == "visible" else ALL
            passes["affinity"] = Pass(over=over, grad=False, class_token=reads)
        return passes

    def num_known(self, visible: int) -> int:
        """Return how many visible patches keep their position: ``int(K·(1 − γ_pos))``."""
        return int(visible * (1 - self.position_mask_ratio))

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no position is dropped."""
        if self.num_known(layout.num_visible) == layout.num_visible:
            raise UserError(
                f"droppos.position_mask_ratio = {self.position_mask_ratio} drops none of "
                f"{layout.num_visible} positions. 0.75 is usual."
            )

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that hides or exchanges unknown places."""
        if encoder.patches_per_token > 1 and self.position_token != "zeros":
            raise UserError(
                f"droppos.position_token is '{self.position_token}', but swin_tiny has offsets "
                "between patches instead of positions to replace. Use zeros."
            )
        if self.position_token == "wrong":
            return ExchangedPlaces("droppos/known", "droppos/order")
        mark = token_parameter(encoder.embed_dim) if self.position_token == "learned" else None
        return ForgottenPlaces("droppos/known", mark)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw which visible patches keep their position."""
        visible = batch[VISIBLE].shape[1]
        keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, "droppos/positions")
        batch["droppos/order"] = order = draws.permutation(keys, visible)
        batch["droppos/known"] = slot_mask(order[:, : self.num_known(visible)], visible)

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set σ, linear from σ0 to σT: in steps, or as published in epochs."""
        sigma = model.objectives.of(PositionClassification).sigma
        done = progress.epoch if self.official else progress.step
        sigma.fill_(linear(self.sigma_start, self.sigma_end, done))
