"""DropPos: reconstructing dropped positions (Wang et al. 2023, arXiv 2309.03576).

Keeps a random quarter of the patches, lets the encoder forget the places of most of them (as
published: one learned vector in place of the position embedding), and classifies each such patch
into one of the N positions of the grid. Two relaxations: labels are smoothed over neighbouring
positions with a width that shrinks to zero, and every patch is weighted by its similarity to the
class token.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, Progress, require_one_view
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import EncoderPass, ForgottenPlaces
from pospre.model.position_task import (
    Answers,
    Distance,
    PositionObjective,
    check_temperature,
    weighted_mean,
)
from pospre.model.question import Question
from pospre.nn.decoder import DecoderBlocks, check_heads, split_tokens
from pospre.nn.initialisation import init_weights, token_parameter
from pospre.nn.masking import (
    Sampling,
    check_uniform,
    num_kept,
    slot_mask,
    uniform_patches,
    visible_patches,
)
from pospre.nn.places import Places
from pospre.nn.vit import Encoder
from pospre.ranges import PositiveShare, Ratio, Width
from pospre.schedules import linear

PositionToken = Literal["learned", "zeros", "wrong"]


def num_shown(visible: int, position_mask_ratio: float) -> int:
    """Return how many of the visible patches keep their position: ``int(K·(1 − γ_pos))``.

    Raises:
        UserError: the ratio drops no position at all.
    """
    shown = int(visible * (1 - position_mask_ratio))
    if shown == visible:
        raise UserError(
            f"droppos.position_mask_ratio = {position_mask_ratio} drops none of {visible} "
            "positions. 0.75 is usual."
        )
    return shown


def draw_dropped(batch: Batch, visible: int, position_mask_ratio: float, seed: int) -> Batch:
    """Return ``droppos/order`` and ``droppos/shown``: which visible slots keep their position."""
    keys = draws.sample_keys(seed, batch["epoch"], batch["index"], 0, "droppos/positions")
    order = draws.permutation(keys, visible)
    shown = slot_mask(order[:, : num_shown(visible, position_mask_ratio)], visible)
    return {"droppos/order": order, "droppos/shown": shown}


def draw_masks(
    batch: Batch,
    grid: tuple[int, int],
    *,
    mask_ratio: float,
    position_mask_ratio: float,
    seed: int,
    sampling: Sampling = "random",
) -> Batch:
    """Return the keys that DropPos writes when it is alone, drawn from (seed, epoch, index)."""
    patches = math.prod(grid)
    visible = num_kept(patches, mask_ratio, key="droppos.mask_ratio")
    masking = (
        uniform_patches(batch, grid, seed)
        if sampling == "uniform"
        else visible_patches(batch, patches, visible, seed)
    )
    return {
        "view/keep": masking.keep,
        "view/removed": masking.removed,
        **draw_dropped(batch, visible, position_mask_ratio, seed),
    }


class WrongPlaces(nn.Module):
    """Hands the i-th slot that is not shown the place of the i-th in random order."""

    def forward(self, places: Places, batch: Batch, where: EncoderPass) -> Places:
        """Return the places with those that are not shown exchanged, perhaps for their own."""
        order, shown, cells = batch["droppos/order"], batch["droppos/shown"], batch["view/keep"]
        turn = shown.sum(1, keepdim=True) + (~shown).cumsum(1) - 1
        others = cells.gather(1, order.gather(1, turn))
        return places.move(torch.where(shown, cells, others))


def _dropped(dim: int, kind: PositionToken) -> nn.Module:
    """Return what hides the places that are not shown, or exchanges them."""
    if kind == "wrong":
        return WrongPlaces()
    mark = token_parameter(dim) if kind == "learned" else None
    return ForgottenPlaces("droppos/shown", mark, shown=True)


class PositionClassification(PositionObjective):
    """The position decoder, and the weighted cross-entropy with smoothed labels."""

    def __init__(self, encoder: Encoder, options: "DropPos") -> None:
        super().__init__(
            encoder,
            sigma=options.sigma_start,
            distance=options.distance,
            temperature=options.temperature,
        )
        dim = options.decoder_dim
        self.weight, self.official = options.weight, options.official
        self.affinity, self.sampling = options.affinity, options.sampling
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
            keep = None if self.affinity == "visible" else batch["view/keep"]
            outputs["affinity"] = self.attentive_weights(passes[source], keep)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return Σ w·CE / Σ w over the patches without position (Eq. 8)."""
        keep = batch["view/keep"]
        log_prob = F.log_softmax(outputs["logits"].float(), dim=-1)
        smooth = self.targets(official=self.official)
        cross_entropy = -(smooth[keep] * log_prob).sum(-1)
        weights = (~batch["droppos/shown"]).float()
        if self.ignore_confident:
            confidence = log_prob.detach().gather(2, keep.unsqueeze(-1)).squeeze(-1).exp()
            weights = weights * (confidence < smooth.diagonal()[keep])
        if "affinity" in outputs:
            weights = weights * outputs["affinity"]
        # all patches may be confident at once: then the loss is 0, not 0/0
        return weighted_mean(cross_entropy, weights)

    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        """Return where it puts the visible patches; those without position count."""
        told = batch["droppos/shown"]
        return Answers(outputs["logits"], batch["view/keep"], told, ~told)


@dataclass(kw_only=True, eq=False)
class DropPos(PretrainAlgorithm):
    """Predict the positions of visible patches; alone, or beside a host that masks.

    Writes ``droppos/order`` (B, K), the visible slots in random order, and ``droppos/shown``, bool
    (B, K): the first of that order keep their position. Alone it also writes ``view/keep`` and
    ``view/removed``; beside MAE (multi-task) it takes MAE's visible patches, and one encoder pass
    serves both.

    Args:
        mask_ratio: γ, share of patches removed, in [0, 1). None: the host's, or 0.75 alone.
        position_mask_ratio: γ_pos, share of visible patches that lose their position, in (0, 1].
        sigma_start: σ0, width of the label smoothing at the start, in patches; 0 is one-hot.
        sigma_end: σT, its width at the end; the decay is linear in steps.
        distance: ``squared`` Euclidean in the exponent (published code) or ``euclid`` (Eq. 5).
        temperature: τ of the attentive weights; None weighs all dropped patches alike. As
            published, the weights are normalised over what one forward pass sees, so that the loss
            depends (slightly) on the microbatch size and the number of ranks; without them it does
            not.
        affinity: the patches behind the attentive weights: the ``full`` image (published), or the
            ``visible`` ones with all their positions, at about a quarter of the cost, or the full
            image as another algorithm's momentum ``teacher`` sees it: free where that pass is made
            anyway (ijepa; lut with symmetric: true).
        position_token: what replaces a dropped position: one ``learned`` vector, ``zeros``, or
            ``wrong``: the image's dropped positions in random order, in which one patch on average
            meets its own (as published, where the order is one for a whole batch). Where positions
            act in attention, a dropped one has angle 0 and bias 0, and its token has what is named
            here added to it.
        sampling: of the visible patches when alone: ``random``, or ``uniform``, one of every 2×2
            (UM-MAE; mask_ratio 0.75).
        ignore_confident: leave out patches whose predicted probability has reached its target.
        decoder_dim: width of the position decoder (it has no position embedding).
        decoder_depth: its number of blocks.
        decoder_heads: its attention heads.
        official: the published code where it differs: label smoothing normalised over columns, and
            σ decayed once an epoch so that it never reaches σT.
        weight: factor of this loss in the total (published multi-task: 0.05 for B, 0.1 for L).
    """

    question: ClassVar[Question | None] = Question(
        "Patches of a picture lose their position. Does the model put them back in their place?",
        "accuracy",
        "share of these patches put in their place",
        "position_grid",
    )
    objective = PositionClassification

    mask_ratio: Ratio | None = None
    position_mask_ratio: PositiveShare = 0.75
    sigma_start: NonNegativeFloat = 1.0
    sigma_end: NonNegativeFloat = 0.0
    distance: Distance = "squared"
    temperature: PositiveFloat | None = 0.1
    affinity: Literal["full", "visible", "teacher"] = "full"
    position_token: PositionToken = "learned"
    sampling: Sampling = "random"
    ignore_confident: bool = False
    decoder_dim: Width = 512
    decoder_depth: NonNegativeInt = 2
    decoder_heads: PositiveInt = 16
    official: bool = False
    weight: NonNegativeFloat = 1.0

    takes_merged_patches: ClassVar[bool] = True

    def attach(self, model: PretrainModel) -> None:
        """Add decoder, passes and the editor of places; a no-op if they are there."""
        if "droppos" in model.objectives:
            _check_teacher(self, model)
            return
        require_one_view(model, "droppos", "view")
        _check(self, model, self._host(model))
        if self._host(model) is None:
            kept = num_kept(model.encoder.num_patches, self._ratio)
            model.registry.claim("view/keep", "droppos", count=kept)
            model.registry.claim("view/removed", "droppos", shuffled=True)
            model.registry.add_pass("student", "droppos", EncoderPass(keep="view/keep"))
        model.registry.claim("droppos/order", "droppos")
        told = "of the patches framed in green the position is told"
        model.registry.claim("droppos/shown", "droppos", green=told)
        model.places.named["droppos"] = _dropped(model.encoder.embed_dim, self.position_token)
        model.registry.join_pass("student", "droppos", places=("droppos",))
        if self.temperature is not None and self.affinity == "teacher":
            model.registry.add_pass("teacher", "droppos", EncoderPass(teacher=True))
        elif self.temperature is not None:
            keep = "view/keep" if self.affinity == "visible" else None
            model.registry.add_pass("affinity", "droppos", EncoderPass(keep=keep, grad=False))
        model.add_objective("droppos", PositionClassification(model.encoder, self))

    def _host(self, model: PretrainModel) -> str | None:
        """Return the algorithm that chooses the visible patches; None: this one."""
        writer = model.registry.writers.get("view/keep", "droppos")
        return None if writer == "droppos" else writer

    @property
    def _ratio(self) -> float:
        return 0.75 if self.mask_ratio is None else self.mask_ratio

    def couples_samples(self) -> str | None:
        """Return what looks at all samples of a forward at once."""
        whole = self.temperature is not None or self.ignore_confident
        return "the weights of patches" if whole else None

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the visible patches (unless a host did) and which of them keep their position."""
        _check_teacher(self, model)
        if self._host(model) is not None:
            visible = batch["view/keep"].shape[1]
            masks = draw_dropped(batch, visible, self.position_mask_ratio, model.seed)
        else:
            masks = draw_masks(
                batch,
                model.encoder.grid,
                mask_ratio=self._ratio,
                position_mask_ratio=self.position_mask_ratio,
                seed=model.seed,
                sampling=self.sampling,
            )
        batch.update(masks)

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set σ: from σ0 to σT per step, or as published per epoch."""
        objective = model.objectives["droppos"]
        assert isinstance(objective, PositionClassification)
        fraction = progress.epoch if self.official else progress.step
        objective.sigma.fill_(linear(self.sigma_start, self.sigma_end, fraction))


def _check(options: DropPos, model: PretrainModel, host: str | None) -> None:
    """Raise ``UserError`` for options that cannot work together, or beside ``host``."""
    writers = model.registry.writers
    masking = writers.get("view/visible", writers.get("view/hidden"))
    if masking is not None:
        raise UserError(
            f"algorithms: droppos classifies the patches that the encoder sees, but '{masking}' "
            "gives it masked ones as well, which only their positions tell apart. Use droppos "
            "alone or with mae."
        )
    if host is not None and options.mask_ratio is not None:
        raise UserError(
            f"droppos.mask_ratio = {options.mask_ratio}, but '{host}' already chooses the visible "
            f"patches. Remove it (or set it to null) and use {host}.mask_ratio."
        )
    check_heads("droppos", "decoder", options.decoder_dim, options.decoder_heads)
    check_temperature("droppos", model.encoder, options.temperature)
    _check_positions(options, model.encoder)
    if options.sampling == "uniform":
        _check_uniform(options, model.encoder.grid, host)
    visible = model.encoder.num_patches
    if host is None:
        visible = num_kept(visible, options._ratio, key="droppos.mask_ratio")
    num_shown(visible, options.position_mask_ratio)


def _check_positions(options: DropPos, encoder: Encoder) -> None:
    """Raise ``UserError`` for positions that this encoder cannot drop."""
    if encoder.patches_per_token > 1 and options.position_token != "zeros":
        raise UserError(
            f"droppos.position_token is '{options.position_token}', but swin_tiny has offsets "
            "between patches instead of positions to replace. Use zeros."
        )


def _check_uniform(options: DropPos, grid: tuple[int, int], host: str | None) -> None:
    """Raise ``UserError`` where one patch of every 2×2 cannot be what is visible."""
    if host is not None:
        raise UserError(
            f"droppos.sampling = uniform chooses the visible patches, but '{host}' does so "
            "already. Use random, or droppos alone."
        )
    check_uniform("droppos", options._ratio, grid)


def _check_teacher(options: DropPos, model: PretrainModel) -> None:
    """Raise ``UserError`` if nobody has brought the teacher; it may come after DropPos."""
    needed = options.affinity == "teacher" and options.temperature is not None
    if needed and model.teacher is None:
        raise UserError(
            "droppos.affinity = teacher takes another algorithm's momentum teacher, and none has "
            "one. Add lut or ema_teacher, or use droppos.affinity = full."
        )
