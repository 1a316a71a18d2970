"""MAE: masked autoencoders (He et al. 2022, arXiv 2111.06377).

Masks most patches, encodes only the rest, and lets a light decoder regress the pixels of the
removed patches. The decoder is thrown away after pre-training.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from timm.layers import LayerNorm
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, require_one_view
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.passes import EncoderPass
from pospre.nn.decoder import check_heads, decoder_blocks, patchify
from pospre.nn.encoder import Encoder
from pospre.nn.masking import gather_tokens, num_kept, scatter_tokens, visible_patches
from pospre.nn.positions import decoder_positions, sincos_positions
from pospre.nn.weights import init_weights, token_parameter
from pospre.recipe.ranges import Ratio, Width


class PixelRegression(Objective):
    """The decoder, and the mean squared error over removed patches."""

    def __init__(self, encoder: Encoder, options: "MAE") -> None:
        super().__init__()
        dim = options.decoder_dim
        self.patch_size, self.grid = encoder.patch_size, encoder.grid
        self.norm_pix = options.norm_pix
        self.weight, self.num_prefix = options.weight, encoder.num_prefix_tokens
        self.embed = nn.Linear(encoder.embed_dim, dim)
        self.blocks = decoder_blocks(dim, options.decoder_depth, options.decoder_heads)
        self.norm = LayerNorm(dim)
        self.predict = nn.Linear(dim, math.prod(encoder.patch_size) * encoder.channels)
        init_weights(self)
        self.mask_token = token_parameter(dim)
        self.position_ND: Tensor
        positions = sincos_positions(dim, *encoder.grid)
        self.register_buffer("position_ND", positions, persistent=False)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return predicted and true pixels of the removed patches, each (B, N−K, h·w·C)."""
        keep, removed = batch["view/keep"], batch["view/removed"]
        tokens = self.embed(passes["student"])
        prefix, visible = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        background = self.mask_token.to(tokens.dtype).expand(len(tokens), len(self.position_ND), -1)
        positions = decoder_positions(self.position_ND, batch, self.grid)
        patches = scatter_tokens(background, keep, visible) + positions
        decoded = self.blocks(torch.cat([prefix, patches], dim=1))
        # only removed patches enter the loss, so only they are predicted
        predicted = self.predict(self.norm(gather_tokens(decoded[:, self.num_prefix :], removed)))
        target = patchify(batch["view/pixels"][:, 0], self.patch_size)
        return {"predicted": predicted, "target": self._normalise(gather_tokens(target, removed))}

    def _normalise(self, target_BRF: Tensor) -> Tensor:
        if not self.norm_pix:
            return target_BRF
        mean = target_BRF.mean(-1, keepdim=True)
        variance = target_BRF.var(-1, keepdim=True)  # unbiased, as published
        return (target_BRF - mean) / (variance + 1e-6).sqrt()

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean squared error over the removed patches (Sec. 3)."""
        return (outputs["predicted"].float() - outputs["target"]).square().mean()


@dataclass(kw_only=True, eq=False)
class MAE(PretrainAlgorithm):
    """The host that predicts removed pixels.

    Writes ``view/keep`` (B, K), the visible patches, and ``view/removed`` (B, N−K).

    Args:
        mask_ratio: share of patches removed, in [0, 1).
        decoder_dim: width of the decoder.
        decoder_depth: its number of blocks.
        decoder_heads: its attention heads.
        norm_pix: regress pixels normalised within each patch (better features, blurrier pictures).
        weight: factor of this loss in the total.
    """

    mask_ratio: Ratio = 0.75
    decoder_dim: Width = 512
    decoder_depth: NonNegativeInt = 8
    decoder_heads: PositiveInt = 16
    norm_pix: bool = True
    weight: NonNegativeFloat = 1.0

    is_host: ClassVar[bool] = True

    def attach(self, model: PretrainModel) -> None:
        """Add the visible-patches pass and the pixel objective; a no-op if they are there."""
        if "mae" in model.objectives:
            return
        require_one_view(model, "mae", "view")
        kept = num_kept(model.encoder.num_patches, self.mask_ratio, key="mae.mask_ratio")
        if kept == model.encoder.num_patches:
            raise UserError(f"mae.mask_ratio = {self.mask_ratio} removes no patch to predict.")
        check_heads("mae", "decoder", self.decoder_dim, self.decoder_heads)
        model.registry.claim("view/keep", "mae", count=kept)
        model.registry.claim("view/removed", "mae", shuffled=True)
        model.registry.add_pass("student", "mae", EncoderPass(keep="view/keep"))
        model.add_objective("mae", PixelRegression(model.encoder, self))

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw which patches stay visible."""
        patches = model.encoder.num_patches
        kept = num_kept(patches, self.mask_ratio)
        batch["view/keep"], batch["view/removed"] = visible_patches(
            batch, patches, kept, model.seed
        )
