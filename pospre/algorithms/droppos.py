"""DropPos: reconstructing dropped positions (Wang et al. 2023, arXiv 2309.03576).

Keeps a random quarter of the patches and drops the positions of most of them: as published, one
learned vector replaces the position embedding. Each such patch is classified into one of the N
positions of the grid. Two relaxations help. Labels are smoothed over neighbouring positions, with a
width that shrinks to zero. Every patch is weighted by its similarity to the class token.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.batch import EPOCH, INDEX, VISIBLE, Batch
from pospre.errors import UserError
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import ExchangedPlaces, ForgottenPlaces
from pospre.model.position_task import Answers, PositionObjective, PositionTask, weighted_mean
from pospre.model.progress import Progress
from pospre.model.task_description import TaskDescription
from pospre.model.uses import ALL, SEEN, Hides, Pass, Uses
from pospre.nn.block import DecoderBlocks
from pospre.nn.encoder_interface import PatchEncoder, split_tokens
from pospre.nn.initialisation import init_weights, token_parameter
from pospre.nn.masking import PatchMasking, Sampling, slot_mask
from pospre.ranges import Depth, PositiveShare, Ratio, Width


def num_known(visible: int, position_mask_ratio: float) -> int:
    """Return how many visible patches keep their position: ``int(K·(1 − γ_pos))``, below K."""
    known = int(visible * (1 - position_mask_ratio))
    if known == visible:
        raise UserError(
            f"droppos.position_mask_ratio = {position_mask_ratio} drops none of {visible} "
            "positions. 0.75 is usual."
        )
    return known


def draw_known(batch: Batch, visible: int, position_mask_ratio: float, seed: int) -> Batch:
    """Return ``droppos/order`` and ``droppos/known``: which visible slots keep their position."""
    keys = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "droppos/positions")
    order = draws.permutation(keys, visible)
    known = slot_mask(order[:, : num_known(visible, position_mask_ratio)], visible)
    return {"droppos/order": order, "droppos/known": known}


class PositionClassification(PositionObjective):
    """The position decoder, and the weighted cross-entropy with smoothed labels."""

    def __init__(self, encoder: PatchEncoder, options: "DropPos") -> None:
        super().__init__(encoder, options)
        dim = options.decoder_dim
        self.official, self.affinity = options.official, options.affinity
        self.ignore_confident = options.ignore_confident
        self.per_token = encoder.patches_per_token
        self.embed = nn.Linear(encoder.embed_dim, dim * self.per_token)
        self.blocks = DecoderBlocks(dim, options.decoder_depth, options.decoder_heads)
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.predict = nn.Linear(dim, encoder.num_patches)
        init_weights(self)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``logits`` (B, K, N), and ``affinity`` (B, K) if attentive weights are on."""
        decoded = self.blocks(split_tokens(self.embed(passes["student"]), self.per_token))
        outputs = {"logits": self.predict(self.norm(decoded[:, self.num_prefix :]))}
        source = "teacher" if self.affinity == "teacher" else "affinity"
        if self.temperature is not None and source in passes:
            # a pass over the visible patches has no others to leave out
            seen = None if self.affinity == "visible" else batch[VISIBLE]
            outputs["affinity"] = self.attentive_weights(passes[source], seen)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return Σ w·CE / Σ w over the patches without position (Eq. 8)."""
        true = batch[VISIBLE]
        log_prob = F.log_softmax(outputs["logits"].float(), dim=-1)
        smooth = self.targets(official=self.official)
        cross_entropy = -(smooth[true] * log_prob).sum(-1)
        weights = (~batch["droppos/known"]).float()
        if self.ignore_confident:
            confidence = log_prob.detach().gather(2, true.unsqueeze(-1)).squeeze(-1).exp()
            weights = weights * (confidence < smooth.diagonal()[true])
        if "affinity" in outputs:
            weights = weights * outputs["affinity"]
        return weighted_mean(cross_entropy, weights)

    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return the predicted positions of the visible patches; those without position count."""
        known = batch["droppos/known"]
        return Answers(outputs["logits"], batch[VISIBLE], known, ~known)


@dataclass(kw_only=True, eq=False)
class DropPos(PositionTask):
    """Predict the positions of visible patches, alone or with a host that masks.

    Writes ``droppos/order`` (B, K), the visible slots in random order, and ``droppos/known``, bool
    (B, K): the first of that order keep their position. Alone it also writes ``view/visible`` and
    ``view/hidden``. Beside MAE (multi-task) it uses MAE's visible patches, and both share one
    encoder pass.

    Args:
        mask_ratio: γ, share of patches removed, in [0, 1). None: the host's, or 0.75 alone.
        position_mask_ratio: γ_pos, share of visible patches that lose their position, in (0, 1].
        affinity: the patches behind the attentive weights. ``full``: the whole image (published).
            ``visible``: the visible patches with all their positions, at about a quarter of the
            cost. ``teacher``: the whole image in another algorithm's momentum teacher, at no cost
            if that pass runs anyway (ijepa; lut with symmetric: true).
        position_token: what replaces a dropped position: one ``learned`` vector, ``zeros``, or
            ``wrong``: the image's dropped positions in random order (published: one order per
            batch). If positions act in attention, a dropped one has angle 0 and bias 0, and its
            token also gets the vector named here.
        sampling: of the visible patches when alone: ``random``, or ``uniform``, one of every 2×2
            (UM-MAE; mask_ratio 0.75).
        ignore_confident: leave out patches whose predicted probability has reached its target.
        decoder_dim: width of the position decoder (it has no position embedding).
        decoder_depth: its number of blocks.
        decoder_heads: its attention heads.
        official: follow the published code where it differs: label smoothing normalised over
            columns, and σ decayed once per epoch, which never reaches σT.

    ``PositionTask`` has the others. Published with MAE: ``weight`` 0.05 for B, 0.1 for L.
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
    position_mask_ratio: PositiveShare = 0.75
    sigma_start: NonNegativeFloat = 1.0
    temperature: PositiveFloat | None = 0.1
    affinity: Literal["full", "visible", "teacher"] = "full"
    position_token: Literal["learned", "zeros", "wrong"] = "learned"
    sampling: Sampling = "random"
    ignore_confident: bool = False
    decoder_dim: Width = 512
    decoder_depth: Depth = 2
    decoder_heads: PositiveInt = 16
    official: bool = False

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over visible patches, whose places it drops, and that of the weights."""
        passes = {"student": Pass(over=SEEN, edits_places=True)}
        weighs = self.temperature is not None
        if weighs and self.affinity == "teacher":
            passes["teacher"] = Pass(teacher=True)
        elif weighs:
            seen = VISIBLE if self.affinity == "visible" else ALL
            passes["affinity"] = Pass(over=seen, grad=False)
        return Uses(
            hides=Hides(self._masking(encoder).num_visible, unless_host=True),
            sees="shown",
            passes=passes,
            keys={"droppos/order": None, "droppos/known": "keep their position"},
            predicts="places",
            class_token="droppos.temperature" if weighs else None,
            widths={"decoder": (self.decoder_dim, self.decoder_heads)},
            couples="the weights of patches" if weighs or self.ignore_confident else None,
            hint="Use droppos alone or with mae.",
        )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` for options that a host decides, or if no position is dropped."""
        hides = layout.hides
        assert hides is not None
        if layout.hider != self.module_name():
            for option in ("mask_ratio", "sampling"):
                host = f"the host {layout.hider}, which chooses the visible patches"
                self.check_used(option, False, host)
        num_known(hides.visible or layout.encoder.num_patches, self.position_mask_ratio)

    def _masking(self, encoder: PatchEncoder) -> PatchMasking:
        ratio = 0.75 if self.mask_ratio is None else self.mask_ratio
        return PatchMasking.by_ratio("droppos", encoder.grid, ratio, self.sampling)

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
        """Draw the visible patches (unless a host did) and which of them keep their position."""
        if model.layout.hider == self.module_name():
            batch.update(self._masking(model.encoder).draw(batch, model.seed))
        visible = batch[VISIBLE].shape[1]
        batch.update(draw_known(batch, visible, self.position_mask_ratio, model.seed))

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set σ: from σ0 to σT per step, or as published per epoch."""
        done = progress._replace(step=progress.epoch) if self.official else progress
        super().schedule(model, done)
