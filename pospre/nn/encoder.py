"""The Vision Transformer encoder: timm's weights and names, run over the tokens that matter."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from pospre.errors import UserError, suggestion
from pospre.nn.positions import sincos_positions
from pospre.nn.weights import init_weights

Positions = Callable[[Tensor], Tensor]
"""Takes the positions (B, K, D) of the tokens that a pass sees and returns what to add instead."""


@dataclass(frozen=True)
class EncoderSize:
    """The shape of one Vision Transformer and the name timm knows it by."""

    timm_name: str
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int


SIZES = {
    "vit_tiny16": EncoderSize("vit_tiny_patch16_224", 16, 192, 12, 3),
    "vits16": EncoderSize("vit_small_patch16_224", 16, 384, 12, 6),
    "vitb16": EncoderSize("vit_base_patch16_224", 16, 768, 12, 12),
    "vitl16": EncoderSize("vit_large_patch16_224", 16, 1024, 24, 16),
    "vith14": EncoderSize("vit_huge_patch14_224", 14, 1280, 32, 16),
}


class Encoder(VisionTransformer):
    """A ViT without head whose forward takes kept tokens and per-sample positions.

    Its parameters carry timm's names, so that its ``state_dict`` is a timm checkpoint as it stands.
    Positions are the fixed sin-cos table of MAE (zero for the class token).

    Attributes:
        image_size: (height, width) in pixels.
        patch_size: side of a patch in pixels.
        grid: (rows, columns) of patches; ``num_patches`` is their product.
        timm_name: the timm architecture, and ``timm_kwargs`` what differs from its defaults.
    """

    def __init__(
        self, size: EncoderSize, *, image_size: tuple[int, int], patch_size: int, depth: int
    ) -> None:
        super().__init__(
            img_size=image_size,
            patch_size=patch_size,
            embed_dim=size.embed_dim,
            depth=depth,
            num_heads=size.num_heads,
            num_classes=0,
            weight_init="skip",
        )
        self.image_size, self.patch_size = image_size, patch_size
        self.grid = (image_size[0] // patch_size, image_size[1] // patch_size)
        self.num_patches = self.grid[0] * self.grid[1]
        self.timm_name = size.timm_name
        self.timm_kwargs: dict[str, int | tuple[int, int]] = {}
        if image_size != (224, 224):
            self.timm_kwargs["img_size"] = (
                image_size[0] if image_size[0] == image_size[1] else image_size
            )
        if patch_size != size.patch_size:
            self.timm_kwargs["patch_size"] = patch_size
        if depth != size.depth:
            self.timm_kwargs["depth"] = depth
        self._init_parameters()

    @torch.no_grad()
    def _init_parameters(self) -> None:
        init_weights(self)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.view(self.embed_dim, -1))
        nn.init.normal_(self.cls_token, std=0.02)
        self.pos_embed.requires_grad_(False)
        self.pos_embed.zero_()
        self.pos_embed[0, 1:] = sincos_positions(self.embed_dim, *self.grid)

    cls_token: nn.Parameter
    pos_embed: nn.Parameter

    def forward(
        self,
        images_B3HW: Tensor,
        keep_BK: Tensor | None = None,
        positions: Positions | None = None,
    ) -> Tensor:
        """Encode the kept patches of normalised images.

        Args:
            images_B3HW: normalised float images.
            keep_BK: int64 indices of the patches to encode, in output order; None takes all.
            positions: maps the table's positions (B, K, D) of those patches to the ones to add;
                None adds the table's.

        Returns:
            (B, 1+K, D) tokens after the final norm; token 0 is the class token.
        """
        tokens = self._embed(images_B3HW, keep_BK)
        table = self.pos_embed[0, 1:]
        position_BKD = table.expand_as(tokens) if keep_BK is None else table[keep_BK]
        if positions is not None:
            position_BKD = positions(position_BKD)
        cls = (self.cls_token + self.pos_embed[:, :1]).expand(len(tokens), -1, -1)
        # under autocast the sum is float32, and so is the residual stream, as in the published code
        tokens = torch.cat([cls, tokens + position_BKD], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)

    def _embed(self, images_B3HW: Tensor, keep_BK: Tensor | None) -> Tensor:
        """Embed only the kept patches: (B, K, D); removed ones are not even copied."""
        projection = self.patch_embed.proj
        (rows, cols), side = self.grid, self.patch_size
        patches = images_B3HW.unflatten(3, (cols, side)).unflatten(2, (rows, side))
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # B, rows, cols, channel, side, side
        if keep_BK is None:
            kept = patches.flatten(1, 2)
        else:
            batch = torch.arange(len(patches), device=keep_BK.device).unsqueeze(1)
            kept = patches[batch, keep_BK // cols, keep_BK % cols]
        return F.linear(kept.flatten(2), projection.weight.flatten(1), projection.bias)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Tell Composer's FSDP2 to shard block by block."""
        return isinstance(module, Block)


def build_encoder(
    name: str,
    *,
    image_size: int | tuple[int, int] = 224,
    patch_size: int | None = None,
    depth: int | None = None,
) -> Encoder:
    """Build an encoder by name.

    Args:
        name: one of ``SIZES``: ``vit_tiny16``, ``vits16``, ``vitb16``, ``vitl16``, ``vith14``.
        image_size: side in pixels, or (height, width).
        patch_size: side of a patch; None takes the name's.
        depth: number of blocks; None takes the name's.

    Raises:
        UserError: unknown name, or an image size that the patch size does not divide.
    """
    if name not in SIZES:
        raise UserError(f"encoder.name is '{name}'.{suggestion(name, SIZES)}")
    size = SIZES[name]
    patch = size.patch_size if patch_size is None else patch_size
    height_width = (image_size, image_size) if isinstance(image_size, int) else image_size
    blocks = size.depth if depth is None else depth
    for key, value in (("patch_size", patch), ("depth", blocks), ("image_size", min(height_width))):
        if value < 1:
            raise UserError(f"encoder.{key} is {value}, but must be at least 1.")
    for side in height_width:
        if side % patch:
            near = max(patch, round(side / patch) * patch)
            raise UserError(
                f"encoder.image_size = {side} is not divisible by the patch size {patch}. "
                f"Use {near}, or another encoder.patch_size."
            )
    return Encoder(size, image_size=height_width, patch_size=patch, depth=blocks)
