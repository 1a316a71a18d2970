"""What runs, exports and hubs record of an encoder beside its tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor

from pospre.arguments import check_arguments
from pospre.errors import UserError
from pospre.nn.build import encoder_size
from pospre.nn.encoder_options import EncoderOptions, Positions
from pospre.nn.positions.file_tables import Grid
from pospre.nn.positions.foreign import DINOV3, keeping_grid, table_grid
from pospre.nn.positions.scheme import Resampling
from pospre.nn.sizes import pair
from pospre.nn.swin.encoder import SWIN
from pospre.object_store import Bucket, is_remote
from pospre.ranges import Size
from pospre.recipe.inputs import OF_WEIGHTS
from pospre.untrusted_json import is_number, parse_json, parse_object

RECORD = "pospre.json"
"""Record in a ``.pth`` export with the texts that a ``.safetensors`` file has in its header."""
_HUB = ("model.safetensors", "pytorch_model.bin")
_LARGEST = 1 << 20  # bytes of a description
_ACTIVATIONS = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
Kind = TypeVar("Kind", bound=BaseModel)
Weights = Literal["student", "teacher"]
"""Which encoder of a checkpoint or a file: the trained one, or its momentum teacher."""


@dataclass(frozen=True)
class Known:
    """What is recorded of an encoder; None or empty: nothing.

    Attributes:
        positions: as in a recipe.
        grid: (rows, columns) of its tables of positions.
        heads: number of attention heads.
        activation: of the MLPs without gates, by timm's name.
        pixels: ``mean`` and ``std`` that its weights expect, each with numbers per channel.
        resampling: how its positions get to another grid.
        encoder: the arguments of ``build_encoder``; of our own runs and exports.
    """

    positions: Positions | None = None
    grid: Grid | None = None
    heads: int | None = None
    activation: str | None = None
    pixels: dict[str, tuple[float, ...]] = field(default_factory=dict)
    resampling: Resampling | None = None
    encoder: dict[str, Any] | None = None


def of_run(recipe: dict[str, Any], tensors: Mapping[str, Tensor], name: str) -> Known:
    """Return what the run ``name`` records in its ``recipe``; ``tensors`` are the encoder's."""
    options = _options(recipe, name)
    if options["name"] == SWIN:
        return Known(positions=options["positions"], encoder=options)
    grid, heads = grid_and_heads(options)
    table, prefix = tensors.get("pos_embed"), options["class_token"] + options["num_registers"]
    is_fixed = "sincos" in (options["positions"], *options["positions"])
    if table is not None and not is_fixed and "crop_field" in recipe["algorithms"]:
        side = math.isqrt(max(table.shape[1] - prefix, 0))
        grid = side, side  # of the field
    return Known(options["positions"], grid, heads, encoder=options)


def of_export(header: Mapping[str, str], name: str) -> Known | None:
    """Return what our export records in its header; None for other files."""
    try:
        recipe = parse_object(header["recipe"])
        assert isinstance(recipe["encoder"], dict)
    except (KeyError, ValueError, AssertionError):
        return None
    options = _options(recipe, name)
    try:
        given = parse_object(header["timm_kwargs"])
        _take_size(options, tuple(map(_whole, pair(given.get("img_size", 224)))))
    except (KeyError, ValueError, TypeError) as error:
        raise _odd(name, "timm_kwargs") from error
    pixels = {key: _numbers(header, key, name) for key in ("mean", "std")}
    how = header.get("resampling")  # our exports may be of weights of others
    resampling = next((each for each in get_args(Resampling) if each == how), None)
    grid, heads = (None, None) if options["name"] == SWIN else grid_and_heads(options)
    return Known(options["positions"], grid, heads, None, pixels, resampling, options)


def _options(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of ``build_encoder`` in a recorded recipe."""
    own = {key: value for key, value in recipe["encoder"].items() if key not in OF_WEIGHTS}
    return check_arguments("encoder", EncoderOptions, own, source=f"recipe in {name}")


def _take_size(options: dict[str, Any], size: tuple[int, ...]) -> None:
    """Take the size of images for an exported table: only the table's, if it keeps its own grid."""
    if table_grid(options["positions"]) is None:
        options["image_size"] = size
    else:
        grid, _ = grid_and_heads({**options, "image_size": size, "positions": "learned"})
        options["positions"] = keeping_grid(options["positions"], grid, None)


def grid_and_heads(options: Mapping[str, Any]) -> tuple[Grid, int]:
    """Return the grid of an encoder's positions, and the number of its heads; not of Swin."""
    size = encoder_size(EncoderOptions(**options))
    sides = zip(
        pair(options["image_size"]), pair(options["patch_size"] or size.patch_size), strict=True
    )
    rows, columns = (side // patch for side, patch in sides)
    return table_grid(options["positions"]) or (rows, columns), size.num_heads


def _whole(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a size")
    return value


def _numbers(header: Mapping[str, str], key: str, name: str) -> tuple[float, ...]:
    """Return the pixel mean or deviation in a header."""
    try:
        values = parse_json(header[key])
    except (KeyError, ValueError) as error:
        raise _odd(name, key) from error
    if not isinstance(values, list) or not all(map(is_number, values)):
        raise _odd(name, key)
    return tuple(values)


def _odd(name: str, key: str) -> UserError:
    return UserError(f"{name}: '{key}' in its header is not what pospre.export writes")


class _Timm(BaseModel):
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class _Config(BaseModel):
    """The keys that count of ``config.json``, of transformers or timm."""

    num_attention_heads: PositiveInt | None = None
    hidden_act: str | None = None
    image_size: Size | None = None
    patch_size: Size | None = None
    rope_theta: PositiveFloat | None = None
    rope_parameters: dict[str, Any] | None = None
    pretrained_cfg: _Timm = _Timm()


class _Processor(BaseModel):
    """The keys that count of ``preprocessor_config.json``."""

    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None


def of_hub(uri: str) -> Known:
    """Return what ``config.json`` beside a file of transformers' or timm's names says of it."""
    folder, _, file = uri.rpartition("/")
    if file not in _HUB:
        return Known()
    config = _beside(folder, "config.json", _Config)
    processor = _beside(folder, "preprocessor_config.json", _Processor)
    theta = config.rope_theta or (config.rope_parameters or {}).get("rope_theta")
    rotary: Positions = DINOV3 if theta == 100 else {"rotary": {"base": theta}}
    grid = None
    if config.image_size and config.patch_size:
        sides = zip(pair(config.image_size), pair(config.patch_size), strict=True)
        rows, columns = (side // patch for side, patch in sides)
        grid = rows, columns
    means = processor.image_mean or config.pretrained_cfg.mean
    stds = processor.image_std or config.pretrained_cfg.std
    return Known(
        None if theta is None else rotary,
        grid,
        config.num_attention_heads,
        _ACTIVATIONS.get(config.hidden_act or "", config.hidden_act),
        {key: each for key, each in (("mean", means), ("std", stds)) if each},
    )


def _beside(folder: str, name: str, kind: type[Kind]) -> Kind:
    """Return a description in the same folder; with defaults if there is none."""
    if is_remote(folder):
        with Bucket(folder) as bucket:
            text = bucket.find(name)
    else:
        path = Path(folder or ".") / name
        text = path.open("rb").read(_LARGEST) if path.is_file() else None
    try:
        return kind() if text is None else kind.model_validate(parse_object(text))
    except (ValueError, ValidationError) as error:
        raise UserError(f"{folder}/{name} beside the weights cannot be read: {error}") from error
