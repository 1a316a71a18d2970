"""Encoder options, without PyTorch, so that recipes are read quickly."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from pospre.external_class import address_of
from pospre.ranges import Count, PositiveDepth, Ratio, Size

Init = Literal["xavier", "trunc_normal", "deit", "dinov2", "beit"]
Kernel = Literal["bicubic", "pinv", "timm"]
Positions = str | Mapping[str, Mapping[str, Any]]
"""A scheme's name, or ``{name: its options}``."""
if TYPE_CHECKING:
    GivenPositions = Positions | type | Mapping[type, Mapping[str, Any]]
else:  # pydantic gets them from ``_scheme``, and a JSON schema has no classes
    GivenPositions = Positions


def named(positions: GivenPositions) -> Positions:
    """Return positions with a class named by its address."""
    if isinstance(positions, Mapping):
        return {address_of(scheme): options for scheme, options in positions.items()}
    address: str = address_of(positions)
    return address


def _scheme(value: Any) -> Any:
    """Return a scheme by its name; of two forms in one type, pydantic explains each."""
    value = named(value)
    options = value.values() if isinstance(value, Mapping) else ()
    if not isinstance(value, str | Mapping) or not all(isinstance(o, Mapping) for o in options):
        words = "Input should be a scheme's name, or {name: its options}"
        raise PydanticCustomError("range", words)
    return value


@dataclass
class EncoderOptions:
    """The options of an encoder, in Python and in recipes."""

    name: str
    """One of ``pospre.nn.sizes``: ``vit_tiny16``, ``vits16``, ``vitb16``, ``vitl16``, ``vith14``,
    ``vit1b16`` and ``vit5b16`` (Pixio's), ``vitg14`` (DINOv2's, with SwiGLU); ``speech8`` (MP3's,
    for audio clips); or ``swin_tiny`` (DropPos, MAE and supervised only). ``timm:NAME`` takes
    width, depth, heads, MLP and patch size from timm's ViT of that name; for its weights see
    ``wrap_encoder``.
    """
    _: KW_ONLY
    image_size: Size = 224
    """Side in pixels, or (height, width)."""
    patch_size: Size | None = None
    """Side of a patch, or (height, width); None: that of ``name``."""
    depth: PositiveDepth | None = None
    """Number of blocks; None: that of ``name``."""
    num_heads: PositiveInt | None = None
    """Attention heads of each block; None: those of ``name``."""
    channels: Annotated[Count, Field(ge=1)] = 3
    """Input channels, 3 for images."""
    positions: Annotated[GivenPositions, BeforeValidator(_scheme)] = "sincos"
    """A scheme of ``pospre.nn.positions``, by name or as ``{name: its options}``; or a class of
    your own, ``mylab.spiral:Spiral`` (in Python, also the class itself). Added to tokens:
    ``sincos`` (fixed table, MAE's order), ``learned`` (from N(0, 0.02²)) and ``learned_sincos``
    (starts as the fixed table; the class token's row starts at 0). Added to attention: ``relative``
    (learned from 0, one table per block), ``shared_relative`` (one table for all blocks, as in
    BEiT), ``alibi`` (fixed, by distance), ``torus`` (the same without borders) and ``lookhere``
    (fixed, by direction and distance). Rotating queries and keys: ``rotary`` (DINOv3, EVA-02,
    RoPE-ViT), ``rotary_mixed`` (RoPE-ViT, learned) and ``learned_rotary`` (with a table as well).
    ``none``: no positions.
    """
    fades_from: Annotated[GivenPositions, BeforeValidator(_scheme)] | None = None
    """Positions of weights that fade out over the first half of the training, while ``positions``
    fade in. A recipe takes them from its weights, with ``keep: fade``.
    """
    class_token: bool = True
    """Have a class token."""
    num_registers: Count = 0
    """Learned tokens without position that take part in attention."""
    gated_registers: Count = 0
    """So many of these, the last ones, have a gate: a bias of the attention to them, learned in
    each block from −5. For registers that weights lack.
    """
    layer_scale: PositiveFloat | None = None
    """Initial factor of each residual branch, learned per channel; None: no factor."""
    drop_path: Ratio = 0.0
    """Rate at which a sample skips the branches of the last block, in [0, 1); linear from 0 in the
    first block.
    """
    uniform_drop_path: bool = False
    """Use the rate ``drop_path`` in all blocks (DINOv2)."""
    dropout: Ratio = 0.0
    """Rate after projections and positions, in [0, 1), drawn from the forward's keys as drop path.
    """
    final_norm: bool = True
    """Normalise tokens after the last block. Without it, a classifier that averages tokens
    normalises the average (MAE's fine-tuning).
    """
    init: Init = "xavier"
    """``xavier`` (MAE, DropPos, LUT), ``trunc_normal`` (I-JEPA), ``deit`` (also MP3; the patch
    embedding keeps PyTorch's initialisation), ``dinov2`` (as ``deit``, with class token and
    registers from N(0, 1e-6²)), or ``beit`` (SimMIM).
    """
    window: PositiveInt | None = None
    """Side of Swin's attention windows in tokens, 8 by default; ``swin_tiny`` only."""
