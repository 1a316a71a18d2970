"""The encoder that weights show: for recipes that name none, and for messages about those that do.

``encoder: {weights: FILE}`` is enough: width, depth, patch, heads, positions, class token,
registers, layer scale and final norm come from the file's tensors, and from what is recorded beside
them. A run keeps the result in its recipe, so a resumed run does not read the file.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import yaml

from pospre.command_line import spelled
from pospre.errors import UserError
from pospre.nn.build import encoder_size
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.positions import named_scheme, scheme_class
from pospre.nn.positions.file_tables import Grid
from pospre.nn.positions.foreign import adds_table, keeping_grid
from pospre.nn.sizes import EncoderSize, pair
from pospre.nn.swin.encoder import SWIN
from pospre.nn.weights.encoder_from_tensors import encoder_options, shown_heads
from pospre.nn.weights.kernels import becomes_grey
from pospre.nn.weights.timm_models import PREFIX
from pospre.recipe.inputs import OF_WEIGHTS, Encoder
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.folders import checkpoints_of
from pospre.run.checkpoints.reading import recorded_section
from pospre.run.folder import starts_over
from pospre.training.weight_files import Keys, Source, read_source
from pospre.training.weight_records import grid_and_heads

_FACTOR = re.compile(r"blocks\.\d+\.ls[12]\.gamma")
KEYS = Keys("encoder.weights = ", "encoder.weights_from")
USUAL_SIDE = 224
_SIZES = ("image_size", "patch_size")
_SHOWN = (
    *("name", "image_size", "patch_size", "depth", "num_heads", "channels", "positions"),
    *("class_token", "num_registers", "gated_registers", "layer_scale", "final_norm", "window"),
)
"""Options that weights show; the others are about training."""
_SHAPE = ("embed_dim", "hidden_dim", "swiglu", "eps", "key_bias")


def with_encoder(recipe: Recipe) -> Recipe:
    """Return a recipe whose encoder has a name.

    Keys that a recipe without one leaves out are those of the run's checkpoint, if there is one,
    otherwise of ``encoder.weights``.

    Raises:
        UserError: the weights cannot be read, do not show an encoder, or contradict a key.
    """
    given = recipe.encoder
    fades = given.keep == "fade" and given.fades_from is None
    if given.name and not fades:
        return recipe
    recorded = None if starts_over(recipe) else _recorded(recipe)
    if recorded is None:
        assert given.weights is not None  # the section checks it
        recorded = _of_file(given)
    keys = given.model_fields_set
    if given.positions == named_scheme(recorded["positions"])[0]:
        keys = keys - {"positions"}  # the options are those of the weights, or of a fit
    shown = ("fades_from",) if given.name else (*_SHOWN, "keep", "fades_from")
    chosen = {key: value for key, value in recorded.items() if key in shown and key not in keys}
    encoder = Encoder.model_validate({**given.model_dump(exclude_unset=True), **chosen})
    return recipe.with_encoder(encoder)


def _recorded(recipe: Recipe) -> dict[str, Any] | None:
    """Return the encoder in the run's newest readable checkpoint."""
    encoders = (recorded_section(each.uri, "encoder") for each in checkpoints_of(recipe))
    return next((encoder for encoder in encoders if encoder is not None), None)


def _of_file(given: Encoder) -> dict[str, Any]:
    """Return the encoder of the weights; ``UserError`` if a key that is given contradicts it."""
    assert given.weights is not None
    source = read_source(given.weights, given.weights_from, KEYS)
    options = fitting(source)
    grid = grid_of_table(options)
    if "patch_size" in given.model_fields_set and "image_size" not in given.model_fields_set:
        size = pair(options["image_size"])
        options["image_size"] = _whole_patches(size, pair(given.patch_size or 1))
    shape = {key: getattr(given, key) for key in _SIZES if key in given.model_fields_set}
    options = keeping_table({**options, **shape}, grid, source)
    own = {key: getattr(given, key) for key in given.model_fields_set.difference(OF_WEIGHTS)}
    more = given.num_registers - options["num_registers"]
    if more > 0:
        options["gated_registers"] += more
    check_fits(EncoderOptions(**{**_shown(options), **own}), source)
    changes = "positions" in own or given.keep == "fade"
    return {**options, **_repositioned(given, options)} if changes else options


def _repositioned(given: Encoder, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what other positions than those of the weights need to take their place."""
    if given.keep == "fade":
        return {"fades_from": options["positions"]}
    (name, own), (theirs, _) = map(named_scheme, (given.positions, options["positions"]))
    scheme = scheme_class(name)
    if not scheme.can_fit or theirs in (name, "none"):
        return {}
    wanted = {**scheme.fit_needs, **own}
    return {"positions": {name: wanted} if wanted else name, "keep": "fit"}


def fitting(source: Source) -> dict[str, Any]:
    """Return the arguments of ``build_encoder`` that fit weights; ``UserError`` if none do.

    Views are as large as the table of positions, but at most 224 pixels unless a run says more.
    """
    known = source.known
    if known.encoder is not None:
        return {**known.encoder, "positions": known.positions}
    options = encoder_options(
        source.tensors, source.name, known.positions, grid=known.grid, heads=known.heads
    ).options
    views = {**options, "image_size": usual_views(options)}
    return keeping_table(views, grid_of_table(options), source)


def grid_of_table(options: Mapping[str, Any]) -> Grid | None:
    """Return the grid of an encoder's table of positions; None: of Swin, which has none."""
    return None if options["name"] == SWIN else grid_and_heads(options)[0]


def keeping_table(options: Mapping[str, Any], grid: Grid | None, source: Source) -> dict[str, Any]:
    """Return options whose learned table keeps the grid of the weights, whatever the images' is."""
    if grid is None or grid_of_table(options) == grid:
        return {**options}
    positions = keeping_grid(options["positions"], grid, source.known.resampling)
    return {**options, "positions": positions}


def usual_views(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size of views for published weights: 224 px if their table is of a larger square.

    A table of DINOv2's 518 pixels is resampled for other views, as in its own evaluations.
    """
    size, patch = pair(options["image_size"]), pair(options["patch_size"])
    if not adds_table(options["positions"]) or size[0] != size[1] or size[0] <= USUAL_SIDE:
        return size
    return _whole_patches((USUAL_SIDE, USUAL_SIDE), patch)


def _whole_patches(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """Return the largest size of whole patches, at least one, within ``size``."""
    down, across = (max(1, side // part) * part for side, part in zip(size, patch, strict=True))
    return down, across


def check_fits(options: EncoderOptions, source: Source, size: EncoderSize | None = None) -> None:
    """Raise a ``UserError`` if an encoder contradicts weights; it has the section that fits.

    ``size`` is that of an encoder that is built already, which a name need not tell. Weights from
    which no encoder can be inferred are compared tensor by tensor, later.
    """
    try:
        fit = fitting(source)
    except UserError:
        return
    if SWIN in (options.name, fit["name"]):
        return  # compared tensor by tensor
    wrong = _contradictions(options, size or encoder_size(options), fit, source)
    if wrong:
        raise UserError(f"{'; '.join(wrong)}.{fitting_section(options, source)}")


def _contradictions(
    options: EncoderOptions, size: EncoderSize, fit: Mapping[str, Any], source: Source
) -> list[str]:
    """Return in words the options that cannot be those of the weights."""
    other = EncoderOptions(**_shown(fit))
    theirs = encoder_size(other)
    name = source.name

    def differs(key: str, own: Any, actual: Any) -> str:
        return f"encoder.{key} = {own}, but {name} has {actual}"

    wrong = []
    shapes = [key for key in _SHAPE if getattr(size, key) != getattr(theirs, key)]
    if not fit["name"].startswith(PREFIX):  # no tensor shows them
        shapes = [key for key in shapes if key not in ("eps", "key_bias")]
    if shapes:
        own, there = (
            ", ".join(f"{key} {getattr(each, key)}" for key in shapes) for each in (size, theirs)
        )
        wrong.append(differs("name", f"{options.name} ({own})", there))
    depth = options.depth or size.depth
    if depth != (other.depth or theirs.depth):
        wrong.append(differs("depth", depth, f"{other.depth or theirs.depth} blocks"))
    heads = source.known.heads or shown_heads(source.tensors)
    if heads not in (None, size.num_heads):
        wrong.append(differs("num_heads", size.num_heads, heads))
    for key, actual, fits in (
        (
            "channels",
            other.channels,
            options.channels >= other.channels or becomes_grey(options.channels, other.channels),
        ),
        ("class_token", other.class_token, options.class_token == other.class_token),
        ("num_registers", other.num_registers, options.num_registers >= other.num_registers),
    ):
        if not fits:
            wrong.append(differs(key, spelled(getattr(options, key)), spelled(actual)))
    gated = other.gated_registers + max(0, options.num_registers - other.num_registers)
    if gated != options.gated_registers:
        wrong.append(
            f"encoder.gated_registers = {options.gated_registers}, but {gated} of "
            f"encoder.num_registers = {options.num_registers} need a gate for {name}"
        )
    return [*wrong, *_missing_parts(options, other, source)]


def _missing_parts(options: EncoderOptions, other: EncoderOptions, source: Source) -> list[str]:
    """Return in words the layer scale or final norm that only one of the two has."""
    wrong = []
    factors = [key for key in source.tensors if _FACTOR.fullmatch(key)]
    has_none = options.layer_scale is None
    if has_none != (not factors) and not factors_of_one(options, source):
        theirs = "factors" if factors else "none"
        wrong.append(
            f"encoder.layer_scale = {spelled(options.layer_scale)}, but {source.name} has {theirs}"
        )
    if options.final_norm and not other.final_norm:
        wrong.append(f"encoder.final_norm = true, but {source.name} has no final norm")
    return wrong


def factors_of_one(options: EncoderOptions, source: Source) -> set[str]:
    """Return the layer scale's tensors if all are 1 and the encoder has none: it is the same."""
    ones = {key: each for key, each in source.tensors.items() if _FACTOR.fullmatch(key)}
    same = options.layer_scale is None and all(bool((each == 1).all()) for each in ones.values())
    return {*ones} if same else set()


def fitting_section(options: EncoderOptions, source: Source) -> str:
    """Return the ``encoder:`` section that fits weights, ready to copy; "" if none is known."""
    try:
        fit = fitting(source)
    except UserError:
        return ""
    usual = {field.name: field.default for field in fields(EncoderOptions) if field.name != "name"}
    section: dict[str, Any] = {"weights": source.address}
    given = {**asdict(options), **_shown(fit), "fades_from": None}
    if options.image_size != usual["image_size"] and _divides(options, fit):
        given["image_size"] = options.image_size
    for key, value in given.items():
        if key not in usual or value != usual[key]:
            section[key] = _plain(value)
    text = yaml.safe_dump({"encoder": section}, sort_keys=False, allow_unicode=True, width=1000)
    return f" The section that fits (its weights alone, without the other keys, would do):\n{text}"


def _divides(options: EncoderOptions, fit: Mapping[str, Any]) -> bool:
    sides = zip(pair(options.image_size), pair(fit["patch_size"] or 1), strict=True)
    return all(side % part == 0 for side, part in sides)


def _plain(value: Any) -> Any:
    """Return a value as a recipe has it: one number for a square."""
    if isinstance(value, tuple):
        return value[0] if len(set(value)) == 1 else [*value]
    return value


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in _SHOWN}
