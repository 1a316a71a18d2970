"""Patch tokens of an encoder's layers, for whole images, without positions, or shuffled.

Images are kept in memory as bytes. Of every image only some randomly chosen patch tokens are kept.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.batch import INDEX, Batch
from pospre.data.views.options import Crop, ViewGroup
from pospre.evaluation.classification.robustness_conditions import reorder_tiles
from pospre.evaluation.common_settings import Sampling
from pospre.evaluation.features import WHOLE, centre_batches
from pospre.evaluation.layers import layer_tokens
from pospre.evaluation.position.settings import Tokens
from pospre.evaluation.registry import Context
from pospre.model.model import PretrainModel
from pospre.nn.masking import gather_tokens, slot_mask
from pospre.nn.places import Places

Input = Literal["image", "masked", "content", "constant", "shuffled"]
"""Inputs of the encoder: the image with all places known; with 75 % of them forgotten (DropPos,
Table 7); with none known; an image of one colour with all places; and the image with its patches
shuffled, at the places where they are shown.
"""

MASKED_SHARE = 0.75
HELD_OUT = 0.25


class Features(NamedTuple):
    """Tokens of T patches of each of B images, per layer.

    Attributes:
        tokens: float32 (B, T, D) by layer.
        shown: int64 (B, T), where these patches are shown.
        origin: int64 (B, T), their places in the original image.
    """

    tokens: list[Tensor]
    shown: Tensor
    origin: Tensor


def load_images(context: Context, size: tuple[int, int], sampling: Sampling) -> Batch:
    """Return centre views of images of ``context.data``, in the order of the data set."""
    # show the same part of each image at every size; for small encoders, all of it
    crop: Crop = "full" if max(context.image_size) <= WHOLE else "center"
    view = ViewGroup(size=size, crop=crop, flip_rate=0.0)
    shown = centre_batches(context, sampling, view=view)
    batches = [{key: value.cpu() for key, value in batch.items()} for batch in shown]
    order = torch.cat([batch[INDEX] for batch in batches]).argsort()
    return {key: torch.cat([batch[key] for batch in batches])[order] for key in batches[0]}


def in_parts(context: Context, batch: Batch, size: int, title: str) -> Iterator[Batch]:
    """Yield parts of images in memory, ``size`` each, on the device, under a progress bar."""
    starts = range(0, len(batch[INDEX]), size)
    for start in context.track(starts, title, leave=False):
        yield {key: value[start : start + size].to(context.device) for key, value in batch.items()}


def hold_out(batch: Batch, seed: int) -> tuple[Batch, Batch]:
    """Split images into those to fit on and the quarter to measure on, drawn by ``seed``."""
    keys_B = draws.sample_keys(seed, 0, batch[INDEX], 0, "position_probe/held_out")
    order = draws.bits(keys_B, 1)[:, 0].argsort()
    count = round(HELD_OUT * len(order))
    parts = order[count:].sort().values, order[:count].sort().values
    learn, measure = ({key: value[rows] for key, value in batch.items()} for rows in parts)
    return learn, measure


def layer_features(
    context: Context,
    model: PretrainModel,
    batch: Batch,
    layers: Sequence[int],
    shown_as: Input,
    settings: Tokens,
) -> Features:
    """Return some patch tokens of every layer, after the encoder's final norm.

    Of ``masked`` images, these are patches with masked positions.
    """
    seed = settings.seed
    kept: list[list[Tensor]] = [[] for _ in layers]
    tokens_at: list[tuple[Tensor, Tensor]] = []
    for part in in_parts(context, batch, settings.batch_size, f"encoding, {shown_as}"):
        images = model.images(part)[:, 0]
        rows, columns = model.encoder.grid_of(*images.shape[-2:])
        asked_BN = _permutation(part, rows * columns, seed, "asked")
        hidden_BH = asked_BN[:, : round(MASKED_SHARE * rows * columns)]
        asked_BT = (hidden_BH if shown_as == "masked" else asked_BN)[:, : settings.num_tokens]
        origin_BT, places = asked_BT, model.encoder.places_of(images)
        if shown_as == "masked":
            places = _without(places, model, slot_mask(hidden_BH, rows * columns))
        elif shown_as == "content":
            places = places.forget(torch.ones_like(asked_BN, dtype=torch.bool))
        elif shown_as == "constant":
            images = images.mean(dim=(2, 3), keepdim=True).expand_as(images)
        elif shown_as == "shuffled":
            order_BN = _permutation(part, rows * columns, seed, "shuffle")
            images = reorder_tiles(images, order_BN, (rows, columns))
            origin_BT = order_BN.gather(1, asked_BT)
        hidden = layer_tokens(model, images, layers, places=places)
        for into, tokens_BTD in zip(kept, hidden, strict=True):
            patches = tokens_BTD[:, model.encoder.num_prefix_tokens :]
            into.append(gather_tokens(patches, asked_BT).float().cpu())
        tokens_at.append((asked_BT.cpu(), origin_BT.cpu()))
    shown, origin = (torch.cat(part) for part in zip(*tokens_at, strict=True))
    return Features([torch.cat(parts) for parts in kept], shown, origin)


def _permutation(batch: Batch, count: int, seed: int, purpose: str) -> Tensor:
    keys_B = draws.sample_keys(seed, 0, batch[INDEX], 0, f"position_probe/{purpose}")
    return draws.permutation(keys_B, count)


def _without(places: Places, model: PretrainModel, hidden_BN: Tensor) -> Places:
    """Return the places with hidden ones forgotten, with the model's own mark if it has one."""
    marks = (getattr(editor, "mark", None) for editor in model.places.named.values())
    mark = next((mark for mark in marks if mark is not None), None)
    return places.forget(hidden_BN, mark)
