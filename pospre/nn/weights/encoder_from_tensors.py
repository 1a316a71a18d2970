"""Infer an encoder's options from a state dict with timm's names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pospre.errors import UserError
from pospre.nn.encoder_options import Positions
from pospre.nn.positions.file_tables import Grid, read_table, relative_grid
from pospre.nn.positions.foreign import as_text, has_table, is_interleaved, turns
from pospre.nn.sizes import SIZES, EncoderSize
from pospre.nn.weights.address import GRID, as_grid
from pospre.nn.weights.layouts import is_gated
from pospre.nn.weights.names import SHARED, TABLE
from pospre.nn.weights.timm_models import PREFIX, timm_size

# published encoders of other sizes, by width, or by width, MLP width and SwiGLU
_OTHERS = {1408: "vit_giant_patch14_224"}
_DINOV3 = {
    (384, 1536, False): "vit_small_patch16_dinov3",
    (384, 3072, True): "vit_small_plus_patch16_dinov3",
    (768, 3072, False): "vit_base_patch16_dinov3",
    (1024, 4096, False): "vit_large_patch16_dinov3",
    (1280, 10240, True): "vit_huge_plus_patch16_dinov3",
    (4096, 16384, True): "vit_7b_patch16_dinov3",
}
_ROPE_VIT = {
    (384, 1536, False): "vit_small_patch16_rope_224",
    (768, 3072, False): "vit_base_patch16_rope_224",
    (1024, 4096, False): "vit_large_patch16_rope_224",
}
_EVA_02 = {
    (192, 1024, True): "eva02_tiny_patch14_224",
    (384, 2048, True): "eva02_small_patch14_224",
    (768, 4096, True): "eva02_base_patch14_224",
    (1024, 5460, True): "eva02_large_patch14_224",
}
_OWN = f"blocks.0.attn.rel_pos.{TABLE}"
_USUAL_SIDE = 224


class Inferred(NamedTuple):
    """An encoder that tensors show.

    Attributes:
        options: the arguments of ``build_encoder``.
        assumed: what no tensor shows and nothing says, in words.
    """

    options: dict[str, Any]
    assumed: list[str]


def _depth(tensors: Mapping[str, Tensor], width: int, name: str) -> int:
    """Return the number of blocks, whose tensors are compared before any block is built."""
    numbers = {key.split(".")[1] for key in tensors if key.startswith("blocks.")}
    for number in map(str, range(len(numbers))):
        key = f"blocks.{number}.attn.qkv.weight"
        if number not in numbers or key not in tensors:
            raise UserError(
                f"{name} has tensors of {len(numbers)} blocks, but no '{key}'; give a whole file."
            )
        shape = tuple(tensors[key].shape)
        if shape != (3 * width, width):
            raise UserError(
                f"{name}: '{key}' has shape {shape}, but an encoder of width {width} has "
                f"{(3 * width, width)}."
            )
    return len(numbers)


def encoder_options(
    tensors: Mapping[str, Tensor],
    name: str,
    given: Positions | None = None,
    *,
    grid: Grid | None = None,
    heads: int | None = None,
) -> Inferred:
    """Infer the arguments of ``build_encoder`` from an encoder's tensors in the file ``name``.

    Published values fill in what tensors cannot show: the number of heads follows from the width,
    the grid is a square, and without positions the image size is 224 pixels. Layer scale's factors
    are loaded, so their initial value is 1.

    Args:
        tensors: by timm's names.
        name: of the file, for errors.
        given: the positions, if something other than the tensors shows them.
        grid: of the patches, if known.
        heads: of each block, if known.

    Raises:
        UserError: no known encoder has this width, the positions are not of this grid, or the
            tensors are not those of so many blocks.
    """
    kernel = tensors["patch_embed.proj.weight"]
    if kernel.ndim != 4:
        raise UserError(f"{name}: its patch embedding has {kernel.ndim} dimensions instead of 4.")
    patch, width = (int(kernel.shape[2]), int(kernel.shape[3])), len(kernel)
    depth = _depth(tensors, width, name)
    class_token = "cls_token" in tensors
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    bare = registers > 0 or not class_token or (given is not None and has_table(given))
    scheme = _positions(tensors, name, class_token, registers, bare=bare, known=grid)
    rows, columns = scheme.grid or (_USUAL_SIDE / patch[0], _USUAL_SIDE / patch[1])
    positions = scheme.kind if given is None else given
    heads = heads or shown_heads(tensors)
    size_name, size = _size_of(width, tensors, name, given, heads)
    assumed = [f"{size.num_heads} heads"] if heads is None else []
    assumed += [f"a grid of {as_grid(scheme.grid)}"] if scheme.grid and scheme.is_assumed else []
    assumed += [f"positions {as_text(positions)}"] if given is None else []
    return Inferred(
        {
            "name": size_name,
            "num_heads": heads if heads not in (None, size.num_heads) else None,
            "image_size": (round(rows * patch[0]), round(columns * patch[1])),
            "patch_size": patch,
            "depth": depth,
            "channels": int(kernel.shape[1]),
            "positions": positions,
            "class_token": class_token,
            "num_registers": registers,
            "gated_registers": 0,
            "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
            "final_norm": not tensors.keys().isdisjoint(("norm.weight", "norm.bias")),
        },
        assumed,
    )


def shown_heads(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the number of heads that positions show; None: they do not."""
    for key, dim, count in ((SHARED, 2, 1), (_OWN, 2, 1), ("rope.freqs", 4, 2)):
        if key in tensors and tensors[key].ndim == dim:
            return tensors[key].shape[count]
    return None


def _size_of(
    width: int,
    tensors: Mapping[str, Tensor],
    name: str,
    given: Positions | None,
    heads: int | None,
) -> tuple[str, EncoderSize]:
    """Return a published size of these shapes and its name, with ``heads`` if there is one."""
    hidden = len(tensors.get("blocks.0.mlp.fc1.weight", ()))
    shape = (width, hidden, is_gated(tensors))
    fitting = _rotary_sizes(shape, tensors, given)
    fitting += [
        key
        for key, size in SIZES.items()
        if (size.embed_dim, size.hidden_dim, size.swiglu) == shape
    ]
    if width in _OTHERS:
        fitting.append(f"{PREFIX}{_OTHERS[width]}")
    if not fitting:
        raise UserError(
            f"{name}: cannot infer the number of heads of an encoder of width {width} with an MLP "
            f"of {hidden}. Give its timm model: timm:NAME,FILE"
        )
    sizes = [(key, SIZES[key] if key in SIZES else timm_size(key)) for key in fitting]
    return next((each for each in sizes if each[1].num_heads == heads), sizes[0])


def _rotary_sizes(
    shape: tuple[int, int, bool], tensors: Mapping[str, Tensor], given: Positions | None
) -> list[str]:
    """Return the published rotary encoders of this shape; they differ in ε and biases."""
    if given is None or not turns(given):
        return []
    if is_interleaved(given):
        return [f"{PREFIX}{each[shape]}" for each in (_ROPE_VIT, _EVA_02) if shape in each]
    bias = tensors.get("blocks.0.attn.qkv.bias")
    if shape not in _DINOV3 or (bias is not None and bool(bias.chunk(3)[1].any())):
        return []  # DINOv3's keys have no bias
    return [f"{PREFIX}{_DINOV3[shape]}{'' if bias is None else '_qkvb'}"]


class _Positions(NamedTuple):
    """Positions that tensors show; without a table there is no grid."""

    kind: Positions
    grid: Grid | None
    is_assumed: bool = False


def _positions(
    tensors: Mapping[str, Tensor],
    name: str,
    class_token: bool,
    registers: int,
    *,
    bare: bool,
    known: Grid | None,
) -> _Positions:
    """Return the kind of positions and their grid."""
    if "pos_embed" in tensors:
        table = read_table(tensors["pos_embed"], class_token, registers, known=known, bare=bare)
        if table is None:
            raise no_grid(name, name, "pos_embed", tensors["pos_embed"], known)
        return _Positions("sincos" if table.is_fixed else "learned", table.grid, table.is_assumed)
    for kind, key in (("relative", _OWN), ("shared_relative", SHARED)):
        if key in tensors:
            grid = relative_grid(len(tensors[key]), class_token, known)
            if grid is None:
                raise no_grid(name, name, key, tensors[key], known)
            return _Positions(kind, *grid)
    return _Positions("none", known)


def no_grid(name: str, address: str, key: str, table: Tensor, known: Grid | None) -> UserError:
    """Return the error of a table whose grid is not known, or not what it is said to be.

    ``name`` is what the file is called in errors, ``address`` as its user gives it.
    """
    what = f"{name}: the grid of its tensor '{key}' {tuple(table.shape)}"
    if known is not None:
        return UserError(f"{what} is not {as_grid(known)}, as its description says.")
    return UserError(
        f"{what} is not square, and nothing says which it is. Give rows and columns of its "
        f"patches, such as '{address}{GRID}7x28', or its timm model: timm:NAME,FILE"
    )
