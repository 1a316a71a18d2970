"""Common code of evaluations: batches of centre views, labels, and pooled tokens."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pospre.batch import Batch
from pospre.data.loader import ViewLoader, build_loader
from pospre.data.opening import open_reader
from pospre.data.stores.description import first_other, same_samples
from pospre.data.stores.reader import Reader
from pospre.data.stores.subset import half_of
from pospre.data.views.options import Crop, ViewGroup, Views
from pospre.errors import UserError
from pospre.evaluation.common_settings import Half, Pooling, Sampling
from pospre.evaluation.layers import layer_tokens
from pospre.evaluation.registry import Context, Plan
from pospre.model.model import PretrainModel
from pospre.nn.swin.encoder import SWIN
from pospre.object_store import is_remote
from pospre.ranges import Size
from pospre.recipe.recipe import Recipe
from pospre.training.data import storage

WHOLE = 48  # pixels; the short side of Tiny ImageNet is 64


def centre_batches(
    context: Context,
    sampling: Sampling,
    data: str = "",
    *,
    size: Size | None = None,
    view: Views | None = None,
    epoch: int = 0,
    **chosen: Any,
) -> Iterator[Batch]:
    """Yield batches of centre views (short side to 256/224 of the size, then the middle; no flip).

    They are of ``data``; by default, of the measured images, or of the ``half`` of them that is
    set. Views of at most 48 pixels show the whole image, as is usual for CIFAR. Without
    ``num_samples`` all images are read, in order; the last batch may be smaller. Other ``view``
    groups are drawn for ``epoch``. ``chosen`` are
    ``label_fraction`` and ``labels`` of ``build_loader``.
    """
    options = {**context.storage, "channels": context.model.encoder.channels}
    half = None if data else getattr(sampling, "half", None)
    data = data or context.data
    loader = _centre_loader(
        data if half is None else half_of(open_reader(data, **options), half),
        size or context.image_size,
        view,
        batch_size=sampling.batch_size,
        seed=sampling.seed,
        shuffle=sampling.num_samples is not None,
        num_workers=sampling.num_workers,
        **options,
        **chosen,
    )
    loader.epoch = epoch
    wanted = sampling.num_samples or loader.num_samples
    left = min(wanted, loader.num_samples)
    if left < wanted:
        print(f"{wanted} images wanted, {data} holds {left}", file=sys.stderr)
    name = Path(data).name
    with tqdm(total=left, desc=name, unit="img", disable=not context.progress) as bar:
        for batch in loader:
            size = min(left, len(batch["index"]))
            yield {key: value[:size].to(context.device) for key, value in batch.items()}
            bar.update(size)
            context.go_on()
            left -= size
            if not left:
                break


def check_views(recipe: Recipe, data: str) -> bool:
    """Open a data set as for the evaluation, and decode a few of its images, to raise errors.

    Return whether the recipe's model was, or will be, trained on them.
    """
    size = recipe.encoder.image_size
    loader = _centre_loader(data, size, batch_size=1, num_workers=0, **storage(recipe))
    loader.probe()
    loader.reader.close()
    seen, trained_on = recipe.trained_on.identity, recipe.data.path
    if seen is not None and same_samples(seen, loader.identity):
        return True
    if is_remote(trained_on) or is_remote(data):
        return data == trained_on and seen is None
    folder, root = Path(data).resolve(), Path(trained_on).resolve()
    return root in folder.parents or (folder == root and seen is None)


def _centre_loader(
    data: str | Reader, size: Size, view: Views | None = None, **options: Any
) -> ViewLoader:
    return build_loader(
        data,
        views=view or centre_view(size),
        drop_last=False,
        tolerance=0.0,  # figures must compare with others': keep all of the image
        **options,
    )


def centre_view(size: Size) -> ViewGroup:
    """Return the view that evaluations show of every image; see ``centre_batches``."""
    crop: Crop = "full" if np.max(size) <= WHOLE else "center"
    return ViewGroup(size=size, crop=crop, flip_rate=0.0)


def pool_tokens(model: PretrainModel, tokens_BND: Tensor, pooling: Pooling) -> Tensor:
    """Return a float32 vector per image, (B, D): class token, or mean of patch or prefix tokens."""
    prefix = model.encoder.num_prefix_tokens
    which = {"cls": slice(0, 1), "prefix": slice(0, prefix), "mean": slice(prefix, None)}[pooling]
    return tokens_BND[:, which].float().mean(dim=1)


def check_probe(plan: Plan[Any]) -> Reader:
    """Return the labelled data set to fit a classifier to: the bank, or the data without one."""
    bank = plan.settings.bank
    check_pooling(plan)
    data = open_labelled(plan.data)
    if bank is None:
        return data
    voters = open_labelled(bank)
    compare_classes(data, voters)
    if voters.address == data.address:
        print(
            f"warning: {plan.name}: bank={bank} is the measured data: every image was seen with "
            "its label; give the training images as bank",
            file=sys.stderr,
        )
    return voters


def check_images(plan: Plan[Any], least: int) -> int:
    """Return the number of images to measure; raise a ``UserError`` if there are too few."""
    count = count_images(plan.data, getattr(plan.settings, "half", None))
    count = min(count, plan.settings.num_samples or count)
    if count < least:
        raise UserError(
            f"it needs {least} images or more, but only {count} of {plan.data} would be measured."
        )
    return count


def count_images(data: str, half: Half | None) -> int:
    """Return the number of images of a data set, or of a half of them."""
    reader = open_reader(data)
    return len(reader if half is None else half_of(reader, half))


def check_pooling(plan: Plan[Any]) -> None:
    """Raise a ``UserError`` for features of prefix tokens that the encoder does not have."""
    encoder, features = plan.recipe.encoder, plan.settings.features
    lacking = {
        "cls": not encoder.class_token,
        "prefix": not (encoder.class_token or encoder.num_registers),
    }
    if features in lacking and (encoder.name == SWIN or lacking[features]):
        what = "class token" if features == "cls" else "class token and no registers"
        raise UserError(f"features={features}, but the encoder has no {what}; use mean.")


def check_enough(bank: str, images: int, classes: int) -> None:
    """Raise a ``UserError`` if there are too few images or classes to fit a classifier."""
    if images < 10 or classes < 2:
        raise UserError(
            f"bank={bank} gives {images} images of {classes} classes; a classifier needs at least "
            "10 images and 2 classes."
        )


def open_labelled(data: str) -> Reader:
    """Open a data set; raise a ``UserError`` if it has no labels."""
    reader = open_reader(data)
    if reader.classes is None:  # shards from elsewhere may have labels without names
        require_labels(torch.tensor([reader.read(0).label]), data)
    return reader


def compare_classes(data: Reader, bank: Reader) -> None:
    """Raise a ``UserError`` if two data sets number classes differently."""
    names, others = data.classes, bank.classes
    if names is None or others is None:
        print(
            f"warning: the classes of {(data if names is None else bank).address} have no names, "
            "so labels are compared by number",
            file=sys.stderr,
        )
    elif names != others:
        raise UserError(
            f"{data.address} has {len(names)} classes and {bank.address} has {len(others)}; labels "
            "are numbers, so both need the same class names (first difference: "
            f"{first_other(names, others)})."
        )


def require_labels(labels: Tensor, data: str) -> None:
    """Raise a ``UserError`` if an image of ``data`` has no label."""
    if bool((labels < 0).any()):
        raise UserError(
            f"it needs labels, but {data} has none: put the images into one folder per class."
        )


Part = tuple[int | None, Pooling]
"""A layer (0: embedding, 1: first block; None: the encoder's output), and its pooling."""
Parts = Mapping[Part, Tensor]
"""Vectors (M, D) of M images, by part."""


@torch.no_grad()
def encode_parts(
    context: Context,
    models: Mapping[str, PretrainModel],
    parts: Sequence[Part],
    sampling: Sampling,
    data: str = "",
    **options: Any,
) -> tuple[dict[str, Parts], Tensor]:
    """Encode the views of a labelled data set, with the encoder's final norm after each layer.

    All models get the same pixels; ``options`` are those of ``centre_batches``. Return float32
    vectors by model name and part, and the labels (M,), on the CPU.
    """
    pooled_parts: dict[str, dict[Part, list[Tensor]]] = {
        name: {part: [] for part in parts} for name in models
    }
    labels = [torch.zeros(0, dtype=torch.int64)]
    for batch in centre_batches(context, sampling, data, **options):
        labels.append(batch["label"].cpu())
        for name, model in models.items():
            tokens = _tokens(model, model.images(batch)[:, 0], parts)
            for layer, pooling in parts:
                pooled = pool_tokens(model, tokens[layer], pooling)
                pooled_parts[name][layer, pooling].append(pooled.cpu())
    label_M = torch.cat(labels)
    require_labels(label_M, data or context.data)
    return {
        name: {part: torch.cat(vectors) for part, vectors in by_part.items()}
        for name, by_part in pooled_parts.items()
    }, label_M


def _tokens(
    model: PretrainModel, images_BCHW: Tensor, parts: Sequence[Part]
) -> dict[int | None, Tensor]:
    """Return the tokens by layer; encoders without blocks only give their output."""
    layers = sorted({layer for layer, _ in parts if layer is not None})
    if not layers:
        return {None: model.encoder(images_BCHW)}
    return dict(zip(layers, layer_tokens(model, images_BCHW, layers), strict=True))
