"""MAE: masked autoencoders (He et al. 2022, arXiv 2111.06377).

Masks most patches, encodes only the rest, and lets a light decoder regress the pixels of the
hidden patches. The decoder is discarded after pre-training.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.batch import EPOCH, HIDDEN, INDEX, MASKED, VISIBLE, Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs, PixelObjective
from pospre.model.passes import MaskedTokens
from pospre.model.task_description import TaskDescription
from pospre.model.uses import SEEN, Hides, Pass, Uses
from pospre.nn.block import DecoderBlocks
from pospre.nn.encoder_interface import PatchEncoder, split_tokens
from pospre.nn.initialisation import init_weights, token_parameter
from pospre.nn.masking import (
    PatchMasking,
    Sampling,
    gather_tokens,
    num_visible,
    scatter_tokens,
    slot_mask,
)
from pospre.nn.places import view_places
from pospre.nn.positions import decoder_positions
from pospre.ranges import Depth, Ratio, Width


class PixelRegression(PixelObjective):
    """The decoder, and the mean squared error over hidden patches."""

    def __init__(self, encoder: PatchEncoder, options: "MAE") -> None:
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
        dims = encoder.positions.dims._replace(
            dim=dim, num_heads=options.decoder_heads, depth=options.decoder_depth
        )
        self.positions = decoder_positions(encoder.positions, dims)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return predicted and true pixels of the hidden patches, each (B, N−K, h·w·C)."""
        tokens = split_tokens(self.embed(passes["student"]), self.per_token)
        prefix, visible = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        count = math.prod(self.grid)
        background = self.mask_token.to(tokens.dtype).expand(len(tokens), count, -1)
        places = view_places(batch, "view", self.grid)
        patches = self.positions.added(scatter_tokens(background, batch[VISIBLE], visible), places)
        decoded = self.blocks(
            torch.cat([prefix, patches], dim=1), self.positions.layer_terms(places)
        )
        # only hidden patches enter the loss, so only they are predicted
        hidden = gather_tokens(decoded[:, self.num_prefix :], batch[HIDDEN])
        predicted = self.predict(self.norm(hidden))
        return {"predicted": predicted, "target": self.target(batch)}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean squared error over the hidden patches (Sec. 3)."""
        return (outputs["predicted"].float() - outputs["target"]).square().mean()


@dataclass(kw_only=True, eq=False)
class MAE(PretrainAlgorithm):
    """The host that predicts hidden pixels.

    Writes ``view/visible`` (B, K), the visible patches, and ``view/hidden`` (B, N−K); with a
    ``second_mask_ratio`` also ``view/masked``, bool (B, K).
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Most of a picture is hidden. What does the model paint in its place?",
        evaluation="reconstructions",
    )

    mask_ratio: Ratio = 0.75
    """Share of patches hidden, in [0, 1); the number of visible ones is rounded down."""
    sampling: Sampling = "random"
    """``random``, or ``uniform``: one of every 2×2, row by row (UM-MAE; mask_ratio 0.75)."""
    mask_block: PositiveInt = 1
    """Side in patches of the squares that are shown or hidden as one (Pixio, arXiv 2512.15715: 4 of
    16). It divides rows and columns; the number of visible squares is rounded down.
    """
    second_mask_ratio: Ratio = 0.0
    """Share of the visible patches that are encoded as one learned vector (UM-MAE: 0.25)."""
    decoder_dim: Width = 512
    """Width of the decoder."""
    decoder_depth: Depth = 8
    """Number of blocks of the decoder."""
    decoder_heads: PositiveInt = 16
    """Attention heads of the decoder."""
    norm_pix: bool = True
    """Regress pixels normalised within each patch by the unbiased variance: better features,
    blurrier pictures.
    """
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    objective = PixelRegression
    is_host: ClassVar[bool] = True
    takes_merged_patches: ClassVar[bool] = True

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over the visible patches."""
        masks = bool(self.second_mask_ratio)
        return Uses(
            hides=Hides.by(self._masking(encoder)),
            passes={"student": Pass(over=SEEN, edits_content=masks)},
            keys={MASKED: None} if masks else {},
            masked={"view": 1.0} if masks else {},
            widths={"decoder": (self.decoder_dim, self.decoder_heads)},
        )

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` if no patch is hidden, or squares of patches cannot be."""
        super().check_encoder(encoder)
        self.check_used("mask_block", self.sampling == "random", "sampling")
        if self.mask_block > 1 and encoder.patches_per_token > 1:
            raise UserError(
                f"mae.mask_block = {self.mask_block} shows whole squares of patches, but "
                f"{encoder.timm_name} merges patches of different squares. Use a ViT, or "
                "mae.mask_block = 1."
            )
        if self._masking(encoder).num_visible == encoder.num_patches:
            raise UserError(f"mae.mask_ratio = {self.mask_ratio} hides no patch to predict.")

    def content_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the mask token of ``second_mask_ratio``."""
        return MaskedTokens(token_parameter(encoder.patch_dim), "masked")

    def _masking(self, encoder: PatchEncoder) -> PatchMasking:
        return PatchMasking.by_ratio(
            "mae",
            encoder.grid,
            self.mask_ratio,
            self.sampling,
            in_rows=True,
            block=self.mask_block,
        )

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the visible patches that are replaced by a mask token."""
        if self.second_mask_ratio:
            keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, "mae/hidden")
            visible = batch[VISIBLE].shape[1]
            seen = num_visible(visible, self.second_mask_ratio, key="mae.second_mask_ratio")
            batch[MASKED] = slot_mask(draws.permutation(keys, visible)[:, seen:], visible)
