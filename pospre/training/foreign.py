"""Encoders of others as models without methods: of a file, or of timm with a file."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder, check_divides
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.file_tables import FileTable, hold_table
from pospre.nn.positions.foreign import table_grid
from pospre.nn.sizes import pair
from pospre.nn.vit import Encoder
from pospre.nn.weights.address import as_grid
from pospre.nn.weights.encoder_from_tensors import encoder_options
from pospre.nn.weights.kernels import becomes_grey
from pospre.nn.weights.timm_models import PREFIX, timm_size, wrap_encoder
from pospre.training.start_encoder import grid_of_table, keeping_table, usual_views
from pospre.training.start_positions import kept_table
from pospre.training.start_weights import Loaded, take_weights
from pospre.training.weight_files import EXPORTED, Keys, Source, is_weights_file, read_source
from pospre.training.weight_records import Weights

Numbers = Sequence[float] | None


class Shown(NamedTuple):
    """Image size and normalisation for a foreign encoder.

    Attributes:
        image_size: (height, width) in pixels; positions are resampled for it. None: the size of its
            positions, or timm's for the name.
        mean: for normalisation, one per channel in [0, 1] or one for all. None: what the
            weights expect, if known, else ImageNet's.
        std: as ``mean``.
        channels: those of the images; for 1, kernels of RGB are added up. None: the weights'.
    """

    image_size: tuple[int, int] | None = None
    mean: Numbers = None
    std: Numbers = None
    channels: int | None = None


AS_NOTED = Shown()


class Foreign(NamedTuple):
    """A model of only an encoder, on the CPU.

    Attributes:
        model: with the mean and deviation that its weights expect.
        name: the encoder's, for a recipe.
        origin: one line that describes the source.
    """

    model: PretrainModel
    name: str
    origin: str


def open_foreign(
    address: str, weights: Weights, keys: Keys, *, shown: Shown = AS_NOTED, seed: int = 0
) -> Foreign:
    """Return the encoder of a file of weights, of ``timm:NAME,FILE`` or of ``timm:NAME``.

    Args:
        address: see ``pospre.evaluation.models.open_model``.
        weights: the encoder of a file with several.
        keys: names of the options in errors.
        shown: image size and normalisation.
        seed: seed of the random weights of ``timm:NAME``.

    Raises:
        UserError: nothing is found, it cannot be read, or it is not an encoder like ours.
    """
    opened = _of_timm if address.startswith(PREFIX) else _of_file
    return opened(address, weights, shown, seed, keys)


def _of_timm(address: str, weights: Weights, shown: Shown, seed: int, keys: Keys) -> Foreign:
    name, comma, file = address.removeprefix(PREFIX).partition(",")
    if comma and not is_weights_file(file):
        raise UserError(
            f"{keys.weights}{address}: after the comma, give a file that ends in "
            f"{', '.join(EXPORTED)}"
        )
    patch = pair(timm_size(name).patch_size)
    config = timm.get_pretrained_cfg(name)
    size = shown.image_size or pair(config.input_size[1:] if config else 224)
    check_size(size, patch, keys.size)
    vit, encoder = _timm_encoder(name, size)
    positions = encoder.positions.as_given()
    usual = usual_views({"image_size": size, "patch_size": patch, "positions": positions})
    if shown.image_size is None and usual != size:
        vit, encoder = _timm_encoder(name, usual)
    model = _headless(encoder, shown, seed)
    if not comma:
        twin = untrained(model, seed)
        line = (
            f"{address}: RANDOM WEIGHTS of seed {seed}; use {PREFIX}{name},FILE for those of a file"
        )
        return Foreign(twin, address, line)
    source = read_source(file, weights, keys, otherwise=encoder.positions.as_given())
    grid = encoder.grid_of(*(size if config is None else pair(config.input_size[1:])))
    hold = partial(hold_table, usual=grid, bare=vit.no_embed_class)
    return _loaded(model, source, seed, f"{PREFIX}{name}", [], hold)


def _timm_encoder(name: str, size: tuple[int, int]) -> tuple[Any, Encoder]:
    """Return timm's model for images of ``size``, and our encoder with its weights."""
    vit: Any = timm.create_model(name, pretrained=False, img_size=size, num_classes=0)
    for key, part in vit.named_parameters():
        if key.endswith(("ls1.gamma", "ls2.gamma", "gamma_1", "gamma_2")):
            nn.init.ones_(part)  # with timm's 1e-5, wrong branches would go unnoticed
    return vit, wrap_encoder(vit)


def _of_file(uri: str, weights: Weights, shown: Shown, seed: int, keys: Keys) -> Foreign:
    source = read_source(uri, weights, keys)
    known = source.known
    options, assumed = known.encoder or {}, list[str]()
    if not options:
        options, assumed = encoder_options(
            source.tensors, uri, known.positions, grid=known.grid, heads=known.heads
        )
    own, grid = pair(options["image_size"]), grid_of_table(options)
    usual = own if known.encoder else usual_views(options)
    options |= {"image_size": shown.image_size or usual}
    check_size(pair(options["image_size"]), pair(options["patch_size"] or 1), keys.size)
    options = keeping_table(options, grid, source)
    if shown.channels is not None and becomes_grey(shown.channels, options["channels"]):
        options["channels"] = shown.channels
    model = _headless(build_encoder(**options), shown, seed)
    hold = partial(hold_table, usual=model.encoder.grid_of(*own))
    return _loaded(model, source, seed, options["name"], assumed, hold)


def _headless(encoder: PatchEncoder, shown: Shown, seed: int) -> PretrainModel:
    """Return a model of only an encoder."""
    chosen: dict[str, Numbers] = {}
    for key, asked in (("mean", shown.mean), ("std", shown.std)):
        if asked is not None and len(asked) not in (1, encoder.channels):
            raise UserError(
                f"--{key} has {len(asked)} numbers; give one, or {encoder.channels} with commas"
            )
        chosen[key] = asked if asked is None else [*asked] * (encoder.channels // len(asked))
    return PretrainModel(encoder, seed=seed, mean=chosen["mean"], std=chosen["std"])


def _loaded(
    model: PretrainModel,
    source: Source,
    seed: int,
    name: str,
    assumed: Sequence[str],
    hold: Callable[..., FileTable | None],
) -> Foreign:
    """Return ``model`` with all of its weights from ``source``; see ``hold_table``."""
    encoder, known = model.encoder, source.known
    table = hold(encoder, source.tensors, known.grid, known.resampling)
    if table is not None:
        source = replace(source, known=replace(known, grid=table.grid))
    done: Loaded = take_weights(model, source)
    done.assumed += assumed
    if table is not None and table_grid(encoder.positions.as_given()) is None:
        done.resampled += kept_table(encoder)
    if table is not None and table.is_assumed:
        done.assumed.append(f"a grid of {as_grid(table.grid)}")
    if done.fresh:
        raise UserError(f"{source.named} lacks {', '.join(done.fresh)}")
    return Foreign(model, name, "; ".join([str(done), *done.differences]))


def untrained(model: PretrainModel, seed: int) -> PretrainModel:
    """Return a copy of a model on the CPU whose encoder has random weights (``init`` xavier)."""
    twin = copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in twin.encoder.modules():
            reset: Any = getattr(part, "reset_parameters", lambda: None)
            reset()
        twin.encoder.init_parameters("xavier")
    return twin.eval()


def check_size(image_size: tuple[int, int], patch_size: tuple[int, int], key: str) -> None:
    """Raise a ``UserError`` if patches do not divide the size of images that the option gives."""
    for side, patch in zip(image_size, patch_size, strict=True):
        check_divides(side, patch, key=key)
