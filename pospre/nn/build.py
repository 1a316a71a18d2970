"""Encoders by name, with every mistake found before one is made."""

from typing import cast

import timm

from pospre.arguments import typed
from pospre.errors import UserError, suggestion
from pospre.nn.options import Init
from pospre.nn.positions import Positions
from pospre.nn.sizes import SIZES, pair
from pospre.nn.swin.encoder import SWIN, SWIN_NEEDS, build_swin
from pospre.nn.timm_models import PREFIX, timm_size
from pospre.nn.vit import Encoder


@typed
def build_encoder(
    name: str,
    *,
    image_size: int | tuple[int, int] = 224,
    patch_size: int | tuple[int, int] | None = None,
    depth: int | None = None,
    channels: int = 3,
    positions: Positions = "sincos",
    class_token: bool = True,
    num_registers: int = 0,
    layer_scale: float | None = None,
    drop_path: float = 0.0,
    uniform_drop_path: bool = False,
    dropout: float = 0.0,
    final_norm: bool = True,
    init: Init = "xavier",
    window: int | None = None,
) -> Encoder:
    """Build an encoder by name.

    Args:
        name: one of ``SIZES``: ``vit_tiny16``, ``vits16``, ``vitb16``, ``vitl16``, ``vith14``,
            ``vitg14`` (DINOv2's, with SwiGLU); ``speech8`` (MP3's, for clips); or ``swin_tiny``,
            for DropPos and supervised; or ``timm:NAME``: width, depth, heads, MLP and patch of
            timm's ViT of that name (for its weights as well, see ``wrap_encoder``).
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

    Raises:
        UserError: unknown name, an image size that the patch size does not divide, or a value out
            of its range.
    """
    if name == SWIN:
        given = {key: value for key, value in locals().items() if key in SWIN_NEEDS}
        swin = build_swin(image_size, given, drop_path=drop_path, window=window, init=init)
        return cast(Encoder, swin)
    if name not in SIZES and not name.startswith(PREFIX):
        known = [f"{PREFIX}{name}"] if timm.is_model(name) else [*SIZES, SWIN]
        raise UserError(f"encoder.name is '{name}'.{suggestion(name, known)}")
    if window is not None:
        raise UserError(f"encoder.window = {window} is for swin_tiny; {name} has no windows.")
    size = SIZES[name] if name in SIZES else timm_size(name)
    patch = pair(size.patch_size if patch_size is None else patch_size)
    height_width = pair(image_size)
    blocks = size.depth if depth is None else depth
    for key, value, least in (
        ("patch_size", min(patch), 1),
        ("depth", blocks, 1),
        ("image_size", min(height_width), 1),
        ("channels", channels, 1),
        ("num_registers", num_registers, 0),
    ):
        if value < least:
            raise UserError(f"encoder.{key} is {value}, but must be at least {least}.")
    for key, rate in (("drop_path", drop_path), ("dropout", dropout)):
        if not 0 <= rate < 1:
            raise UserError(f"encoder.{key} is {rate}, but must lie in [0, 1).")
    if positions in ("relative", "shared_relative") and num_registers:
        raise UserError(f"encoder.positions = {positions} works without registers only.")
    for side, part in zip(height_width, patch, strict=True):
        check_divides(side, part, key="encoder.image_size")
    return Encoder(
        size,
        image_size=height_width,
        patch_size=patch,
        depth=blocks,
        channels=channels,
        positions=positions,
        class_token=class_token,
        num_registers=num_registers,
        layer_scale=layer_scale,
        drop_path=drop_path,
        uniform_drop_path=uniform_drop_path,
        dropout=dropout,
        final_norm=final_norm,
        init=init,
    )


def check_divides(side: int, patch: int, *, key: str) -> None:
    """Raise ``UserError`` naming ``key`` unless ``patch`` divides ``side``."""
    if side % patch:
        near = max(patch, round(side / patch) * patch)
        raise UserError(
            f"{key} = {side} is not divisible by the patch size {patch}. "
            f"Use {near}, or another encoder.patch_size."
        )
