"""Preparing a batch: the methods' schedules and draws, and checks of the batch."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pospre.batch import EPOCH, INDEX, Batch, field_box_key, image_key, loaded_keys, whole_numbers
from pospre.errors import UserError
from pospre.model.layout import Layout
from pospre.model.sample_numbers import SampleNumbers


def write_draws(model: Any, layout: Layout, batch: Batch, numbers: SampleNumbers | None) -> Batch:
    """Return ``batch`` with the draws of all methods in it, each a function of its samples.

    Args:
        model: the model, for the methods.
        layout: the model's.
        batch: modified in place.
        numbers: notes the samples; None: outside of training.

    Raises:
        UserError: the batch has no integer ``index`` or ``epoch``, other samples had the same, or a
            method's input is missing.
    """
    check_is_batch(batch)
    for key in (INDEX, EPOCH):
        if key not in batch:
            raise UserError(
                f"the batch lacks '{key}', from which masks are drawn. pospre.build_loader writes "
                "it, and so does pospre.from_images(images, index=…, epoch=…)."
            )
        batch[key] = whole_numbers(batch[key], key)
    if numbers is not None:
        numbers.look(batch)
    for name in layout.methods:
        before = {**batch}
        try:
            write_keys(model, layout, name, batch)
        except KeyError as error:
            key = error.args[0]
            if key in batch or key not in (*layout.writers, *loaded_keys(layout.views)):
                raise
            raise lacking(layout, key) from error
        _check_declared(layout, name, before, batch)
    return batch


def write_keys(model: Any, layout: Layout, name: str, batch: Batch) -> None:
    """Write the keys of the method ``name``: the patches that it hides, then what it writes."""
    hides = layout.hides if name == layout.hider else None
    if hides is not None and hides.masking is not None:
        batch.update(hides.masking.draw(batch, model.seed))
    layout.methods[name].write(batch, model)


def _check_declared(layout: Layout, name: str, before: Batch, after: Batch) -> None:
    """Raise ``UserError`` if a method has written a key that it did not declare."""
    for key in (key for key, value in after.items() if before.get(key) is not value):
        owner = layout.writers.get(key)
        if owner not in (None, name) or (owner is None and key not in before):
            placing = key in map(field_box_key, layout.views)
            declared = field_box_key("*") if placing else key
            raise UserError(
                f"algorithms.{name} writes the batch key '{key}', which {owner or 'no algorithm'} "
                "declares. Write only keys that are declared in uses, here keys={"
                f"'{declared}': None}}."
            )


def lacking(layout: Layout, key: str) -> UserError:
    """Return the error for a batch without ``key``."""
    if key in layout.writers and key not in loaded_keys(layout.views):
        return UserError(
            f"the batch lacks '{key}', which algorithms.{layout.writers[key]} writes before the "
            "forward: call model(batch, progress=…), or pass algorithms=model.algorithms to the "
            "Trainer."
        )
    group = key.rpartition("/")[0]
    where = f", for views of the group '{group}'" if group else ""
    return UserError(
        f"the batch lacks '{key}'{where}; pospre.build_loader and pospre.from_images write it."
    )


def check_is_batch(batch: Batch) -> None:
    """Raise ``UserError`` if ``batch`` is not a batch, but for example images alone."""
    if not isinstance(batch, dict):
        raise UserError(
            "a PretrainModel takes a batch, a dict as made by pospre.from_images, not "
            f"{type(batch).__name__}. For tokens of whole images, call model.encoder(images)."
        )


def check_batch(layout: Layout, batch: Batch) -> None:
    """Raise ``UserError`` unless the passes' patches exist and views have the declared shape."""
    check_is_batch(batch)
    for laid in layout.passes.values():
        views, key = layout.views[laid.group], image_key(laid.group)
        shape = (views.count, layout.encoder.channels, *views.shape)
        if key in batch and batch[key].shape[1:] != shape:
            raise UserError(
                f"'{key}' has the shape {tuple(batch[key].shape)}, but the model needs (B, "
                f"{', '.join(map(str, shape))}): views, channels, height and width. Crop the "
                "images to this size, or make the encoder and the model for theirs."
            )
        for patches in (laid.visible, laid.context):
            if patches is not None and patches in layout.writers and patches not in batch:
                raise lacking(layout, patches)


def check_normalised(images: Tensor) -> None:
    """Raise ``UserError`` for images from 0 to 255; normalised ones have negative values."""
    low, high = images.aminmax()
    if not images.is_floating_point() or (low >= 0 and high > 16):
        raise UserError(
            f"model.features got images of {images.dtype} from {low:.4g} to {high:.4g}, but takes "
            "normalised ones: model.augment.normalise(images), with images from 0 to 255."
        )


def check_given(layout: Layout, given: Sequence[Any]) -> None:
    """Raise ``UserError`` unless a Trainer's algorithms are the model's, each of them once."""
    names = [each.module_name() for each in given]
    for name in (each for each in names if names.count(each) > 1):
        raise UserError(f"algorithms.{name} is given twice; give it once.")
    for name in (each for each in names if each not in layout.methods):
        raise UserError(
            f"algorithms.{name} is not part of the model. Make the model with it: model = "
            "pospre.PretrainModel(encoder, [pospre.MAE(), …], seed=0), and pass "
            "algorithms=model.algorithms to the Trainer."
        )
    for name in (each for each in layout.methods if each not in names):
        raise UserError(
            f"algorithms.{name} is part of the model, but is not given; pass "
            "algorithms=model.algorithms to the Trainer."
        )
