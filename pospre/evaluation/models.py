"""Loading the model to measure: from a run, a weights file, or timm."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

from torch import Tensor, nn

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.sizes import pair
from pospre.nn.weights.timm_models import PREFIX, wrap_encoder
from pospre.recipe.recipe import Recipe, recipe_from_dict
from pospre.run.checkpoints.reading import open_checkpoint
from pospre.training.build import build_model, model_of
from pospre.training.foreign import AS_NOTED, Shown, open_foreign, untrained
from pospre.training.weight_files import Keys, is_weights_file
from pospre.training.weight_records import Weights

_BESIDE = "the start sees the same images: encoder.image_size"
MODEL_KEYS = Keys("--model ", "--weights")
START_KEYS = Keys("--start ", "--start", _BESIDE)


class Start(NamedTuple):
    """The encoder that a run started from.

    Attributes:
        model: the encoder.
        address: of its weights.
        moved: how far the run's ``student`` and ``teacher`` have moved from it, see ``moved``.
    """

    model: PretrainModel
    address: str
    moved: Mapping[str, float] = {}


class Subject(NamedTuple):
    """A model to measure, on the CPU.

    Attributes:
        model: the model.
        recipe: its recipe; of a model without a run, its encoder's description without algorithms.
        initial: makes the same model with random weights.
        origin: one line that describes the source; empty for a run.
        step: number of steps trained; None without a run.
    """

    model: PretrainModel
    recipe: Recipe
    initial: Callable[[], PretrainModel]
    origin: str = ""
    step: int | None = None


def open_model(
    address: str,
    *,
    weights: Weights = "student",
    shown: Shown = AS_NOTED,
    seed: int = 0,
    keys: Keys = MODEL_KEYS,
) -> Subject:
    """Return the model at ``address``.

    Args:
        address: a run folder or checkpoint; a weights file, ours or in a layout of
            ``pospre.nn.weights.layouts`` (``FILE,positions=SCHEME`` if no tensor shows its
            positions, ``none`` if it was trained without); ``timm:NAME`` (random weights); or
            ``timm:NAME,FILE``.
        weights: ``teacher`` takes the momentum teacher, if there is one.
        shown: image size and normalisation of a foreign encoder.
        seed: seed of random weights.
        keys: names of the options in errors.

    Raises:
        UserError: nothing is found, it cannot be read, or it is not an encoder like ours; or a
            size, mean or deviation is given for a run, whose recipe defines it.
    """
    if address.startswith(PREFIX) or is_weights_file(address):
        foreign = open_foreign(address, weights, keys, shown=shown, seed=seed)
        return _subject(foreign.model, seed, foreign.name, foreign.origin)
    if shown != AS_NOTED:
        raise UserError(
            f"--image-size, --mean and --std are for foreign weights; {address} is measured with "
            "the values of its recipe"
        )
    checkpoint = open_checkpoint(address)
    model, recipe = model_of(checkpoint, weights=weights)
    return Subject(model, recipe, lambda: build_model(recipe), step=checkpoint.batch)


def open_start(recipe: Recipe) -> Start:
    """Return the encoder that a recipe starts from, see ``open_beside``."""
    given = recipe.encoder
    assert given.weights is not None
    keys = Keys("encoder.weights = ", "encoder.weights_from", _BESIDE)
    return open_beside(given.weights, recipe, keys, weights=given.weights_from)


def open_beside(
    address: str, recipe: Recipe, keys: Keys = START_KEYS, *, weights: Weights = "student"
) -> Start:
    """Return the encoder at an address, on the CPU, with views of a recipe's size.

    It has the positions, patches and normalisation of its weights, as with ``--model FILE``. Beside
    a model of grey images, RGB's kernels are added up.

    Raises:
        UserError: the weights cannot be read, or take other views or channels.
    """
    shown = Shown(pair(recipe.encoder.image_size), channels=recipe.encoder.channels)
    model = open_foreign(address, weights, keys, shown=shown, seed=recipe.seed).model
    if model.encoder.channels != recipe.encoder.channels:
        raise UserError(
            f"{keys.weights}{address} takes {model.encoder.channels} channels, and the model has "
            f"{recipe.encoder.channels}, so both cannot be measured on the same images"
        )
    return Start(model.eval(), address)


def moved(state: Mapping[str, Tensor], start: PretrainModel) -> dict[str, float]:
    """Return ‖θ − θ₀‖ / ‖θ₀‖ of a run's ``student``, and of its ``teacher`` if it has one.

    Args:
        state: the tensors of the run's model, without LoRA pairs.
        start: has θ₀; tensors of other shapes, such as those of other positions, do not count.
    """
    began = {k: v for k, v in start.encoder.state_dict().items() if v.is_floating_point()}
    found = {}
    for name, prefix in (("student", "encoder."), ("teacher", "teacher.module.")):
        away = whole = 0.0
        for key, old in began.items():
            now = state.get(f"{prefix}{key}")
            if now is not None and now.shape == old.shape:
                away += float((now.double() - old.double()).square().sum())
                whole += float(old.double().square().sum())
        if whole:
            found[name] = math.sqrt(away / whole)
    return found


def subject_of(model: PretrainModel | nn.Module, *, seed: int = 0) -> Subject:
    """Return a model made in code, ours or a timm ViT, as a subject to measure."""
    if isinstance(model, PretrainModel):
        return _subject(model, seed)
    return _subject(PretrainModel(wrap_encoder(model), seed=seed), seed)


def _subject(model: PretrainModel, seed: int, name: str = "", origin: str = "") -> Subject:
    """Return a subject without a run; ``name`` is its encoder's in a recipe."""
    height, width = model.encoder.image_size
    if origin:
        origin += f"; images of {height}×{width} pixels, {model.augment.described()}"
    recipe = _recipe_of(model, seed, name)
    return Subject(model, recipe, lambda: untrained(model, seed), origin)


def _recipe_of(model: PretrainModel, seed: int, name: str) -> Recipe:
    """Return a recipe that describes a model's encoder; it cannot be trained."""
    options = model.encoder.options
    pixels = {key: getattr(model.augment, key).flatten().tolist() for key in ("mean", "std")}
    description = {
        "run_name": "model",
        "seed": seed,
        "data": {"path": "none", "batch_size": 1, **pixels},
        "encoder": asdict(replace(options, name=name or options.name)),
        "algorithms": {"none": {}},
        "trainer": {"max_duration": "1ba"},
    }
    return recipe_from_dict(description).model_copy(update={"algorithms": {}})
