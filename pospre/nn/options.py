"""What an encoder can be like; without PyTorch, so that recipes are read at once."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pospre.ranges import Ratio, Size

Init = Literal["xavier", "trunc_normal", "deit", "dinov2", "beit"]
Positions = str | Mapping[str, Mapping[str, Any]]
"""A scheme's name, or ``{name: its options}``."""


@dataclass
class EncoderOptions:
    """The options of an encoder, in Python and in recipes.

    Args:
        name: one of ``pospre.nn.sizes``: ``vit_tiny16``, ``vits16``, ``vitb16``, ``vitl16``,
            ``vith14``, ``vitg14`` (DINOv2's, with SwiGLU); ``speech8`` (MP3's, for clips); or
            ``swin_tiny``, for DropPos and supervised; or ``timm:NAME``: width, depth, heads, MLP
            and patch of timm's ViT of that name (for its weights as well, see
            ``wrap_encoder``).
        image_size: side in pixels, or (height, width).
        patch_size: side of a patch, or (height, width); None takes the name's.
        depth: number of blocks; None takes the name's.
        channels: of the input, 3 for images.
        positions: a scheme of ``pospre.nn.positions`` by name, or ``{name: its options}``:
            ``sincos`` (fixed table, MAE's order), ``learned`` (drawn from N(0, 0.02²)),
            ``learned_sincos`` (starts as the fixed table and learns, the class token's from 0),
            ``none``, a zero-initialised bias of the attention by relative position, one per layer
            (``relative``) or one for all (``shared_relative``, as in BEiT), a fixed bias by
            distance (``alibi``), by direction and distance (``lookhere``), or queries and keys that
            are turned (``rotary``: DINOv3, EVA-02, RoPE-ViT; ``rotary_mixed``: RoPE-ViT, learned;
            ``learned_rotary``: with a table, too).
        class_token: whether there is one.
        num_registers: learned tokens without meaning or position that take part in attention.
        layer_scale: initial factor of each residual branch, learned per channel; None: no factor.
        drop_path: rate at which a sample skips the branches of the last block, in [0, 1); it grows
            linearly from 0 in the first.
        uniform_drop_path: every block has the rate ``drop_path`` instead (DINOv2).
        dropout: rate after projections and positions, in [0, 1); drawn, as drop path is, from the
            keys that the forward gets.
        final_norm: whether tokens are normalised after the last block; without it a classifier that
            averages them normalises the average instead (MAE's fine-tuning).
        init: ``xavier`` (MAE, DropPos, LUT), ``trunc_normal`` (I-JEPA), ``deit`` (MP3 too: the
            patch embedding as PyTorch makes it), ``dinov2`` (that, and class token and registers
            from N(0, 1e-6²)), or ``beit`` (SimMIM).
        window: side of Swin's attention windows in tokens, 8 without it; for ``swin_tiny`` only.
    """

    name: str
    _: KW_ONLY
    image_size: Size = 224
    patch_size: Size | None = None
    depth: Annotated[PositiveInt, Field(le=1024)] | None = None
    channels: PositiveInt = 3
    positions: Positions = "sincos"
    class_token: bool = True
    num_registers: NonNegativeInt = 0
    layer_scale: PositiveFloat | None = None
    drop_path: Ratio = 0.0
    uniform_drop_path: bool = False
    dropout: Ratio = 0.0
    final_norm: bool = True
    init: Init = "xavier"
    window: PositiveInt | None = None
