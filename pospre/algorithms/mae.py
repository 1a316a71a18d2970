"""MAE: masked autoencoders (He et al. 2022, arXiv 2111.06377).

Masks most patches, encodes only the rest, and lets a light decoder regress the pixels of the
removed patches. The decoder is thrown away after pre-training.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, require_one_view
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import EncoderPass, MaskedTokens
from pospre.model.pixel_task import PixelObjective
from pospre.model.question import Question
from pospre.nn.decoder import DecoderBlocks, check_heads, split_tokens
from pospre.nn.initialisation import init_weights, token_parameter
from pospre.nn.masking import (
    Sampling,
    check_uniform,
    gather_tokens,
    num_kept,
    scatter_tokens,
    slot_mask,
    uniform_patches,
    visible_patches,
)
from pospre.nn.places import view_places
from pospre.nn.positions import decoder_positions
from pospre.nn.vit import Encoder
from pospre.ranges import Ratio, Width


class PixelRegression(PixelObjective):
    """The decoder, and the mean squared error over removed patches."""

    def __init__(self, encoder: Encoder, options: "MAE") -> None:
        super().__init__(encoder, norm_pix=options.norm_pix)
        dim = options.decoder_dim
        self.grid, self.weight = encoder.grid, options.weight
        self.per_token = encoder.patches_per_token
        self.embed = nn.Linear(encoder.embed_dim, dim * self.per_token)
        self.blocks = DecoderBlocks(dim, options.decoder_depth, options.decoder_heads)
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.predict = nn.Linear(dim, math.prod(encoder.patch_size) * encoder.channels)
        init_weights(self)
        self.mask_token = token_parameter(dim)
        space = encoder.positions.space._replace(
            dim=dim, num_heads=options.decoder_heads, depth=options.decoder_depth
        )
        self.positions = decoder_positions(encoder.positions, space)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return predicted and true pixels of the removed patches, each (B, N−K, h·w·C)."""
        keep, removed = batch["view/keep"], batch["view/removed"]
        tokens = split_tokens(self.embed(passes["student"]), self.per_token)
        prefix, visible = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        count = math.prod(self.grid)
        background = self.mask_token.to(tokens.dtype).expand(len(tokens), count, -1)
        places = view_places(batch, "view", self.grid)
        patches = self.positions.added(scatter_tokens(background, keep, visible), places)
        decoded = self.blocks(torch.cat([prefix, patches], dim=1), self.positions.clues(places))
        # only removed patches enter the loss, so only they are predicted
        predicted = self.predict(self.norm(gather_tokens(decoded[:, self.num_prefix :], removed)))
        return {"predicted": predicted, "target": self.target(batch)}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean squared error over the removed patches (Sec. 3)."""
        return (outputs["predicted"].float() - outputs["target"]).square().mean()


@dataclass(kw_only=True, eq=False)
class MAE(PretrainAlgorithm):
    """The host that predicts removed pixels.

    Writes ``view/keep`` (B, K), the visible patches, and ``view/removed`` (B, N−K); with a
    ``second_mask_ratio`` also ``view/hidden``, bool (B, K).

    Args:
        mask_ratio: share of patches removed, in [0, 1).
        sampling: of the visible patches: ``random``, or ``uniform``, one of every 2×2, row by row
            (UM-MAE, arXiv 2205.10063, also for Swin; mask_ratio 0.75).
        second_mask_ratio: share of the visible patches that are encoded as one learned vector
            instead of what they show (UM-MAE: 0.25).
        decoder_dim: width of the decoder.
        decoder_depth: its number of blocks.
        decoder_heads: its attention heads.
        norm_pix: regress pixels normalised within each patch (better features, blurrier pictures).
        weight: factor of this loss in the total.
    """

    question: ClassVar[Question | None] = Question(
        "Most of a picture is hidden. What does the model paint in its place?",
        evaluation="reconstructions",
    )

    mask_ratio: Ratio = 0.75
    sampling: Sampling = "random"
    second_mask_ratio: Ratio = 0.0
    decoder_dim: Width = 512
    decoder_depth: NonNegativeInt = 8
    decoder_heads: PositiveInt = 16
    norm_pix: bool = True
    weight: NonNegativeFloat = 1.0

    objective = PixelRegression
    is_host: ClassVar[bool] = True
    takes_merged_patches: ClassVar[bool] = True

    def attach(self, model: PretrainModel) -> None:
        """Add the visible-patches pass and the pixel objective; a no-op if they are there."""
        if "mae" in model.objectives:
            return
        require_one_view(model, "mae", "view")
        kept = num_kept(model.encoder.num_patches, self.mask_ratio, key="mae.mask_ratio")
        if kept == model.encoder.num_patches:
            raise UserError(f"mae.mask_ratio = {self.mask_ratio} removes no patch to predict.")
        check_heads("mae", "decoder", self.decoder_dim, self.decoder_heads)
        if self.sampling == "uniform":
            check_uniform("mae", self.mask_ratio, model.encoder.grid)
        if not model.encoder.takes(kept):
            raise UserError(
                f"mae.mask_ratio = {self.mask_ratio} leaves {kept} patches, which fill no square "
                f"for {model.encoder.timm_name}. Use 0.75, with mae.sampling: uniform."
            )
        model.registry.claim("view/keep", "mae", count=kept)
        model.registry.claim("view/removed", "mae", shuffled=self.sampling == "random")
        hiding: tuple[str, ...] = ()
        if self.second_mask_ratio:
            model.registry.claim("view/hidden", "mae")
            token = token_parameter(model.encoder.patch_embed.proj.out_channels)
            model.contents.named["mae"] = MaskedTokens(token, "hidden")
            hiding = ("mae",)
        model.registry.add_pass("student", "mae", EncoderPass(keep="view/keep", content=hiding))
        model.add_objective("mae", PixelRegression(model.encoder, self))

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw which patches stay visible, and which of them are hidden all the same."""
        patches, seed = model.encoder.num_patches, model.seed
        kept = num_kept(patches, self.mask_ratio)
        batch["view/keep"], batch["view/removed"] = (
            uniform_patches(batch, model.encoder.grid, seed, shuffled=False)
            if self.sampling == "uniform"
            else visible_patches(batch, patches, kept, seed)
        )
        if self.second_mask_ratio:
            keys = draws.sample_keys(seed, batch["epoch"], batch["index"], 0, "mae/hidden")
            seen = num_kept(kept, self.second_mask_ratio, key="mae.second_mask_ratio")
            batch["view/hidden"] = slot_mask(draws.permutation(keys, kept)[:, seen:], kept)
