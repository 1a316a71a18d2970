"""The start of a run from weights: as they are, or with other positions fitted to theirs.

``encoder: {weights: FILE, positions: torus, keep: fit}`` gives published weights positions that
they were not trained with. Class token and registers take over their rows of a table; biases are
fitted in closed form (``nn.position_fit``) on images of the training data. With ``keep: fade``, the
encoder has both (``nn.positions.fading``), and takes weights as any other does. New heads of a
method that asks for it are fitted, too (``fit_heads``).
"""

from dataclasses import asdict
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from pospre.arguments import declared
from pospre.data.loader import build_loader
from pospre.data.reading import Reading
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.calibration import NUM_VIEWS, calibrate, calibrated
from pospre.model.model import PretrainModel
from pospre.model.teacher import follow
from pospre.nn.build import build_encoder
from pospre.nn.encoder_options import Kernel
from pospre.nn.position_fit import fit_biases
from pospre.nn.positions import schemes_that
from pospre.nn.positions.fading import add_prefix
from pospre.nn.positions.foreign import as_text, without_grid
from pospre.nn.vit import Encoder
from pospre.training.build import Components
from pospre.training.data import build_views, storage
from pospre.training.start_encoder import fitting, grid_of_table, keeping_table
from pospre.training.start_shapes import take_pixels
from pospre.training.start_weights import Loaded, load, take_encoder, take_weights
from pospre.training.weight_files import Source

_MOST, _LEAST = 16, 8  # images of a fit
_BATCH = 32


def start_from(parts: Components) -> tuple[str, list[str]]:
    """Load the weights that a recipe names; see ``load_weights``.

    Also return timm's names of the tensors that are fresh.
    """
    given = parts.recipe.encoder
    assert given.weights is not None
    take = partial(_take_fitted, parts) if given.keep == "fit" else take_weights
    return load(parts.model, given.weights, given.weights_from, given.kernel, take)


def _take_fitted(parts: Components, model: PretrainModel, source: Source, kernel: Kernel) -> Loaded:
    """Load weights into an encoder whose positions are not theirs, and fit its biases to theirs."""
    encoder = model.vit
    original = _original(encoder, source)
    check_fit(model, original)
    source, about = take_pixels(model, source)
    done = take_encoder(original, source, kernel)
    done.differences += about
    _copy_content(encoder, original)
    images = _images(parts)
    share = fit_biases(encoder, original, images)
    follow(model.teachers.pairs, 0.0)
    names = (f"positions.{name}" for name, _ in encoder.positions.named_parameters())
    done.fresh += map(encoder.timm_name_of, names)
    done.differences.append(
        f"encoder.positions = {encoder.positions.name}, but {source.name} has "
        f"{as_text(without_grid(original.positions.as_given()))}: biases are fitted to what those "
        f"do to attention, {share:.2f} of it (variance, {len(images)} images)"
    )
    return done


@torch.no_grad()
def _copy_content(encoder: Encoder, original: Encoder) -> None:
    """Copy all weights but those of patches' positions; prefix tokens get theirs added."""
    own = {k: v for k, v in original.state_dict().items() if not k.startswith("positions.")}
    encoder.load_state_dict(own, strict=False)
    add_prefix(encoder, original.positions)


def _original(encoder: Encoder, source: Source) -> Encoder:
    """Return an encoder like this one with the positions of the weights."""
    theirs = fitting(source)
    like = {**asdict(encoder.options), "positions": without_grid(theirs["positions"])}
    with torch.random.fork_rng(devices=[]):
        original = build_encoder(**keeping_table(like, grid_of_table(theirs), source))
    assert isinstance(original, Encoder)  # Swin's positions are not fitted
    return original


def check_fit(model: PretrainModel, original: Encoder) -> None:
    """Raise ``UserError`` if the encoder's positions cannot be fitted to those of the weights."""
    scheme, theirs = model.vit.positions, original.positions
    key = f"encoder.keep = fit with positions = {scheme.name}"
    if not scheme.can_fit:
        raise UserError(
            f"{key}: nothing of {scheme.name} can be fitted to weights; use "
            f"{schemes_that('can_fit')}, or leave the file's positions out with ',positions=drop'"
        )
    wrong = [name for name, value in scheme.fit_needs.items() if getattr(scheme, name) != value]
    if wrong:
        wanted = as_text({scheme.name: {**scheme.options, **scheme.fit_needs}})
        raise UserError(f"{key} needs learned {wrong[0]}: use encoder.positions = {wanted}")
    if theirs.name in ("none", scheme.name):
        raise UserError(
            f"{key}, but the weights have {theirs.name}: there is nothing to fit. Leave "
            "encoder.keep out."
        )
    if model.layout.placer is not None:
        raise UserError(
            f"{key}: views that {model.layout.placer} places in a field have other distances than "
            "the weights' images. Leave one of them out."
        )


def _images(parts: Components) -> Tensor:
    """Return normalised images of the training data, the same on every rank."""
    recipe, count = parts.recipe, min(_MOST, parts.loader.num_samples)
    if count < _LEAST or parts.loader.reader.features is not None:
        what = f"{count} of them" if count < _LEAST else "features"
        raise UserError(
            f"encoder.keep = fit needs {_LEAST} images or more, but data.path = "
            f"{recipe.data.path} has {what}. Leave the file's positions out instead: "
            f"'{recipe.encoder.weights},positions=drop'."
        )
    view = ViewGroup(name="fit", size=recipe.encoder.image_size, crop="center", flip_rate=0.0)
    loader = build_loader(
        recipe.data.path, views=[view], batch_size=count, seed=recipe.seed, **storage(recipe)
    )
    batch = next(iter(loader))
    return parts.model.augment(batch["fit/image"], batch["fit/flip"])[:, 0]


def fit_heads(parts: Components) -> str | None:
    """Fit the heads to the first views of the run's data; return a line, or None without such.

    All ranks read the same samples: the weights are a function of the seed.
    """
    model, recipe, device = parts.model, parts.recipe, parts.device
    from_weights = recipe.encoder.weights is not None
    wanted = calibrated(model, from_weights=from_weights)
    if not wanted:
        return None
    count = max(model.views[model.layout.passes[name].group].count for name in wanted.values())
    loader = build_loader(
        recipe.data.path,
        views=list(build_views(recipe.in_stage(parts.stage)).values()),
        batch_size=_BATCH,
        seed=recipe.seed,
        drop_last=False,
        **{**declared(recipe.data, Reading), **storage(recipe)},
    )
    before = next(model.parameters()).device
    device.module_to_device(model)
    batches = islice(loader, -(-NUM_VIEWS // (count * _BATCH)))
    given = map(device.batch_to_device, batches)
    views = calibrate(model, given, from_weights=from_weights)
    model.to(before)
    reference = all(model.layout.passes[name].reference for name in wanted.values())
    whose = "the reference" if reference else "the start"
    return f"heads of {' and '.join(wanted)} fitted to {views} views of {whose}"
