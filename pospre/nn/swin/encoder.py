"""Swin-T over packed patches, without position leaks (for DropPos).

The kept patches are packed into a smaller square map (uniform masking of Li et al. 2022, UM-MAE).
The order of ``keep`` must be random: a patch's slot then reveals nothing about its place. Places
enter only through each block's attention bias, see ``attention.py``.
"""

import re
from typing import Any, ClassVar

import torch
from timm.layers import LayerNorm, Mlp
from timm.models.swin_transformer import PatchMerging, window_partition, window_reverse
from torch import Tensor, nn

from pospre.command_line import spelled
from pospre.errors import UserError
from pospre.nn.block import residual_factors
from pospre.nn.encoder_interface import Edit, PatchEncoder
from pospre.nn.encoder_options import EncoderOptions, Init
from pospre.nn.initialisation import init_patch_embed, init_trunc_normal, init_weights
from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme, TransformerDims
from pospre.nn.projections import check_parts, parts_of
from pospre.nn.sizes import pair
from pospre.nn.swin.attention import (
    WindowAttention,
    inner_places,
    merged_places,
    shift_mask,
    spread,
)

SWIN = "swin_tiny"
SWIN_NEEDS: dict[str, Any] = {
    "patch_size": None,
    "depth": None,
    "num_heads": None,
    "channels": 3,
    "positions": "relative",
    "fades_from": None,
    "class_token": False,
    "num_registers": 0,
    "gated_registers": 0,
    "uniform_drop_path": False,
    "layer_scale": None,
    "dropout": 0.0,
    "final_norm": True,
}
"""Options of ``build_encoder`` with only one valid value for Swin."""
TOKEN = 4  # pixels of the smallest token's side
DEPTHS, HEADS, WIDTH, WINDOW = (2, 2, 6, 2), (3, 6, 12, 24), 96, 8
MERGED = 2  # the last stage merges 2×2 patches into one token


class SwinBlock(nn.Module):
    """Window attention and MLP, pre-norm; every second block shifts its windows by half."""

    def __init__(self, dim: int, num_heads: int, reach: int, *, window: int, shifted: bool) -> None:
        super().__init__()
        self.window, self.shifted = window, shifted
        self.norm1 = LayerNorm(dim, eps=1e-5)
        self.attn = WindowAttention(dim, num_heads, reach)
        self.norm2 = LayerNorm(dim, eps=1e-5)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(
        self, tokens_BHWC: Tensor, places_BHW3: Tensor | None, branch_B2: Tensor | None
    ) -> Tensor:
        """Return the tokens after window attention and MLP; see ``WindowAttention``."""
        factors = (1, 1) if branch_B2 is None else branch_B2[..., None, None, None].unbind(1)
        mixed = self._attend(self.norm1(tokens_BHWC), places_BHW3)
        tokens_BHWC = tokens_BHWC + factors[0] * mixed
        return tokens_BHWC + factors[1] * self.mlp(self.norm2(tokens_BHWC))

    def _attend(self, tokens_BHWC: Tensor, places_BHW3: Tensor | None) -> Tensor:
        side = tokens_BHWC.shape[1]
        window = min(self.window, side)
        shift = window // 2 if self.shifted and side > window else 0
        size = window, window

        def cut(map_BHWC: Tensor) -> Tensor:
            return window_partition(map_BHWC.roll((-shift, -shift), (1, 2)), size).flatten(1, 2)

        tokens, places = cut(tokens_BHWC), None if places_BHW3 is None else cut(places_BHW3)
        mask = None
        if shift:
            mask = shift_mask(side, window, shift).to(tokens.device)
            mask = mask.repeat(len(tokens_BHWC), 1, 1).unsqueeze(1)
        mixed = window_reverse(self.attn(tokens, places, mask), size, side, side)
        return mixed.roll((shift, shift), (1, 2))


class Stage(nn.Module):
    """Patch merging (except in the first stage), then blocks."""

    def __init__(self, stage: int, window: int, image_size: int) -> None:
        super().__init__()
        dim, reach = WIDTH * 2**stage, image_size // TOKEN // 2**stage
        self.downsample = PatchMerging(dim // 2) if stage else nn.Identity()
        self.blocks = nn.ModuleList(
            SwinBlock(dim, HEADS[stage], reach, window=window, shifted=bool(block % 2))
            for block in range(DEPTHS[stage])
        )


class PatchEmbed(nn.Module):
    """Embeds tokens of 4×4 pixels; timm's names."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, TOKEN, TOKEN)
        self.norm = LayerNorm(WIDTH, eps=1e-5)

    def forward(self, patches_BKCHW: Tensor, content: Edit | None = None) -> Tensor:
        """Return (B, K, tokens per patch side, the same, C) for patches of pixels."""
        batch, num = patches_BKCHW.shape[:2]
        tokens = self.proj(patches_BKCHW.flatten(0, 1)).permute(0, 2, 3, 1)
        tokens = tokens.unflatten(0, (batch, num))
        return self.norm(tokens if content is None else content(tokens))


class WindowPositions(Scheme):
    """Swin's scheme: each block computes a bias from token offsets within windows."""

    name = "relative"
    takes_any_grid: ClassVar[bool] = False
    takes_boxes: ClassVar[bool] = False
    timm = "vit"


class SwinEncoder(PatchEncoder):
    """Swin-T over packed 16-px patches; positions can be known or dropped per patch."""

    patches_per_token = MERGED**2
    timm_head = "head.fc"

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        self.options = options
        (image_size, _), window = pair(options.image_size), options.window or WINDOW
        patch = TOKEN * 2 ** (len(DEPTHS) - 2)
        self.set_grid((image_size, image_size), (patch, patch))
        self.patch_dim = WIDTH
        self.embed_dim, self.depth = WIDTH * 2 ** (len(DEPTHS) - 1), sum(DEPTHS)
        self.channels, self.drop_path = 3, options.drop_path
        self.window = window
        dims = TransformerDims(self.embed_dim, HEADS[-1], self.depth, self.grid)
        self.positions = WindowPositions(dims)
        self.patch_embed = PatchEmbed()
        self.layers = nn.ModuleList(
            Stage(stage, window, image_size) for stage in range(len(DEPTHS))
        )
        self.norm = LayerNorm(self.embed_dim, eps=1e-5)
        self.init_parameters(options.init)
        self.built = parts_of(self)

    def init_parameters(self, init: Init) -> None:
        """Reinitialise all weights; see ``build_swin``."""
        init_trunc_normal(self)
        if init == "xavier":
            init_weights(self)
            init_patch_embed(self.patch_embed.proj)

    def forward(
        self,
        images_BCHW: Tensor,
        visible_BK: Tensor | None = None,
        places: Places | None = None,
        *,
        content: Edit | None = None,
        context_BM: Tensor | None = None,
        keys_B: Tensor | None = None,
        prefix_only: bool = False,
    ) -> Tensor:
        """Encode the visible patches, packed into a square in the order of ``visible_BK``.

        These are K = s² patches in random order; None: all, in place. ``content`` edits the
        embeddings (B, K, h, w, C) of the visible tokens before their norm. For the others see
        ``Encoder.forward``; Swin has no context and no prefix tokens.

        Returns:
            (B, K/4, D): tokens of 2×2 slots each, row-major.

        Raises:
            UserError: K is not the square of an even number.
        """
        if context_BM is not None or prefix_only:
            raise UserError("encoder.name = swin_tiny takes only whole patches: use a ViT.")
        patches = self.pixels(images_BCHW, visible_BK)
        side = self._side(patches.shape[1])
        tokens = spread(self.patch_embed(patches, content), side)
        if places is None:
            places = self.places_of(images_BCHW, visible_BK)
        self.positions.check(places)
        maps = None  # a whole image, tokens in place
        if places.cells is not None or places.known is not None:
            cells = self._cells(len(patches), places, images_BCHW.device)
            maps = spread(inner_places(cells, tokens.shape[1] // side), side)
        factors = iter(residual_factors(keys_B, self.drop_path, self.depth))
        for number, stage in enumerate(self.layers):
            assert isinstance(stage, Stage)
            if number and maps is not None:
                maps = merged_places(maps)
            tokens = stage.downsample(tokens)
            for block in stage.blocks:
                tokens = block(tokens, maps, next(factors))
        return self.norm(tokens).flatten(1, 2)

    def _cells(self, num: int, places: Places, device: torch.device) -> Tensor:
        """Return float (row, column, 1) of the patches, zeros of forgotten ones: (B, K, 3)."""
        cells = places.cells
        if cells is None:
            cells = torch.arange(self.num_patches, device=device)[None]
        cells = cells.expand(num, -1)
        place = torch.stack([cells // self.grid[1], cells % self.grid[1], 1 + 0 * cells], dim=-1)
        return place.float() if places.known is None else place * places.known.unsqueeze(-1).float()

    def _side(self, num: int) -> int:
        if not self.takes(num):
            raise UserError(
                f"encoder.name = swin_tiny packs the visible patches into a square, but {num} of "
                f"{self.num_patches} are visible. Use mask_ratio 0.75 or 0."
            )
        return round(num**0.5)

    def takes(self, num_visible: int) -> bool:
        """Return whether this number of patches fills a square with an even side."""
        side = round(num_visible**0.5)
        return side * side == num_visible and side % MERGED == 0

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Return whether Composer's FSDP2 shards ``module``: yes for blocks."""
        return isinstance(module, SwinBlock)

    def block_of(self, name: str) -> int | None:
        """Return the block number over all stages; a merging belongs to the block after it."""
        match = re.match(r"layers\.(\d+)\.(?:blocks\.(\d+)|downsample)\.", name)
        return None if match is None else sum(DEPTHS[: int(match[1])]) + int(match[2] or 0)

    def as_timm(self) -> tuple[str, dict[str, Any]]:
        """Return timm's architecture and the arguments that differ from its defaults."""
        options = {"img_size": self.image_size[0], "window_size": self.window}
        return "swin_tiny_patch4_window7_224", options

    def timm_state(
        self, vit: nn.Module | None = None, grid: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Return the weights for timm's Swin, with the biases within a window as tables."""
        check_parts(self, self.built, "encoder")
        state = {k: v.contiguous() for k, v in self.state_dict().items() if "offset_bias" not in k}
        device = next(self.parameters()).device
        for number, stage in enumerate(self.layers):
            assert isinstance(stage, Stage)
            for index, block in enumerate(stage.blocks):
                assert isinstance(block, SwinBlock)
                window = min(self.window, block.attn.reach)
                name = f"layers.{number}.blocks.{index}.attn.relative_position_bias_table"
                state[name] = block.attn.offset_bias(window, device).detach().contiguous()
        return state


def build_swin(options: EncoderOptions) -> SwinEncoder:
    """Build Swin-T; raise ``UserError`` for an option that it does not take or a wrong size."""
    for key, needed in SWIN_NEEDS.items():
        if (given := getattr(options, key)) != needed:
            wanted = spelled(needed)
            raise UserError(f"encoder.name = {SWIN} needs encoder.{key}: {wanted}, not {given}.")
    if options.init not in ("xavier", "trunc_normal"):
        raise UserError(
            f"encoder.name = {SWIN} takes encoder.init: xavier or trunc_normal, not {options.init}."
        )
    side, width = pair(options.image_size)
    if side != width:
        raise UserError(f"encoder.name = {SWIN} takes square images, not {[side, width]}.")
    window = options.window or WINDOW
    patch = TOKEN * 2 ** (len(DEPTHS) - 2)
    maps = [side // (TOKEN * 2**stage) for stage in range(len(DEPTHS))]
    fits = all(tokens > 0 and tokens % min(window, tokens) == 0 for tokens in maps)
    if side % (4 * patch) or not fits:
        raise UserError(
            f"encoder.image_size = {side} with encoder.window = {window} does not fit {SWIN}. "
            f"The size must be a multiple of {4 * patch} pixels, and the window must divide the "
            f"side of larger maps ({maps} tokens).  256 with window 8 (16 to fine-tune) is usual."
        )
    return SwinEncoder(options)
