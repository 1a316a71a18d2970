"""Change of features when positions are shifted, rescaled or removed, or the image is resized.

Each image is encoded as usual, and with other positions: those of patches further down and right
(wrapping at the edges); those of its middle, stretched over the whole image like an enlarged crop;
none, with all places forgotten; at another size, as in fine-tuning; or as a tile of a larger
picture, a mosaic of images drawn by the seed. Disturbances that the encoder's scheme does not
support are skipped, and listed. For each disturbance it measures the
cosine of the disturbed and the usual feature. If the data have classes, it also measures top-1 of
nearest neighbours among the usual features of all other images. All features have much in common,
which moves every cosine towards 1. For comparison, the cosine of two different images is given.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre import draws
from pospre.batch import INDEX, Batch
from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.classification.knn import nearest_class
from pospre.evaluation.classification.robustness_conditions import (
    Move,
    middle_places,
    no_places,
    shifted_places,
)
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.features import check_images, check_pooling, pool_tokens
from pospre.evaluation.layers import planned_encoder
from pospre.evaluation.position.layer_features import in_parts, load_images
from pospre.evaluation.position.settings import ShiftedPositions
from pospre.evaluation.registry import START, UNTRAINED, Context, Plan
from pospre.model.model import PretrainModel
from pospre.nn.positions.scheme import Scheme

FIGURES = {"cosine": "max"}
TEMPERATURE = 0.07
OTHERS = "another image"
SETTINGS = ("shifts", "zooms", "scales", "mosaics")


def evaluate(context: Context, settings: ShiftedPositions) -> dict[str, Any]:
    """Measure every disturbance.

    Returns:
        ``rows`` (one dict per model and disturbance: ``cosine`` with its standard error over
        images, ``top1`` in [0, 1] or None; the last row is for two images), the trained model's
        mean ``cosine`` over all disturbances, and ``left_out``, the settings that its positions do
        not support.
    """
    by_prefix = context.models(baseline=settings.baseline)
    names = {"": "trained", START: "start", UNTRAINED: "untrained"}
    models = {names[prefix]: model for prefix, model in by_prefix.items()}
    load = partial(load_images, context, sampling=settings)
    encoder = context.model.encoder
    batch = load(encoder.image_size)
    labels_B = batch["label"]
    usual = {name: _encode(context, model, batch, settings) for name, model in models.items()}
    rows: list[dict[str, Any]] = []

    def note(what: str, features: Mapping[str, Tensor]) -> None:
        rows.extend(
            {"model": name, "what": what, **_figures(disturbed, usual[name], labels_B, settings.k)}
            for name, disturbed in features.items()
        )

    note("as usual", usual)
    for what, move in moves_of(encoder.positions, settings.shifts, settings.zooms).items():
        encode = partial(_encode, context, batch=batch, settings=settings, move=move)
        note(what, {name: encode(model=model) for name, model in models.items()})
    takes = settings_of(encoder.positions)
    for scale in settings.scales if "scales" in takes else ():
        grid = tuple(max(1, round(scale * side)) for side in encoder.grid)
        size = grid[0] * encoder.patch_size[0], grid[1] * encoder.patch_size[1]
        encode = partial(_encode, context, batch=load(size), settings=settings)
        what = f"image at {grid[0]} x {grid[1]} patches"
        note(what, {name: encode(model=model) for name, model in models.items()})
    for side in settings.mosaics if "mosaics" in takes else ():
        mosaics_MT = mosaics_of(batch[INDEX], side, settings.seed)
        for name, model in models.items():
            tiles_MTD = _encode_tiles(context, model, batch, mosaics_MT, settings.batch_size)
            figures = _tile_figures(tiles_MTD, mosaics_MT, usual[name], labels_B, settings.k)
            rows.append({"model": name, "what": f"tile of {side} x {side}", **figures})
    disturbed = [row["cosine"] for row in rows if row["model"] == "trained"][1:]
    rows += [{"model": name, "what": OTHERS, **_of_others(own)} for name, own in usual.items()]
    return {
        "cosine": sum(disturbed) / len(disturbed),
        "rows": rows,
        "positions": encoder.positions.name,
        "left_out": [name for name in SETTINGS if name not in takes],
        "samples": len(labels_B),
        "grid": list(encoder.grid),
    }


def check(plan: Plan[ShiftedPositions]) -> None:
    """Raise a ``UserError`` for settings that disturb nothing, or cannot be measured."""
    encoder, settings = planned_encoder(plan.recipe), plan.settings
    grid = encoder.grid
    check_pooling(plan)
    takes = settings_of(encoder.positions)
    if not any(getattr(settings, name) for name in takes):
        raise UserError(
            f"nothing to disturb; with encoder.positions = {encoder.positions.name} give "
            f"{' or '.join(takes)}."
        )
    for count in settings.shifts:
        if count > max(4, *grid):
            raise UserError(
                f"shifts={count} wraps around the grid of {grid[0]} x {grid[1]} patches; give at "
                f"most {max(grid)}."
            )
    reader, k = open_reader(plan.data), settings.k
    images = check_images(plan, 2)
    if images <= k and reader.classes is not None:
        raise UserError(f"k={k}, but only {images - 1} images can vote; use k={images - 1}.")
    tiles = max((side**2 for side in settings.mosaics if "mosaics" in takes), default=0)
    if tiles and images < tiles + k:
        raise UserError(
            f"mosaics={math.isqrt(tiles)} shows {tiles} images at once and k={k} others vote, but "
            f"there are {images}; use smaller mosaics, or num_samples of {tiles + k} or more."
        )
    if tiles and settings.features != "mean":
        raise UserError(
            f"features={settings.features}, but a picture of mosaics has one class token for all "
            "its images; use features=mean."
        )


def settings_of(positions: Scheme) -> list[str]:
    """Return the disturbance settings that a scheme supports."""
    any_grid = positions.takes_any_grid
    taken = (positions.can_forget, positions.takes_boxes, any_grid, any_grid)
    return [name for name, takes in zip(SETTINGS, taken, strict=True) if takes]


def mosaics_of(index_B: Tensor, side: int, seed: int) -> Tensor:
    """Return the rows (M, side²) of images, drawn by ``seed``; those left over are in no mosaic."""
    keys_B = draws.sample_keys(seed, 0, index_B, 0, "shifted_positions/mosaics")
    order_B = draws.bits(keys_B, 1)[:, 0].argsort()
    return order_B[: len(order_B) // side**2 * side**2].view(-1, side**2)


def moves_of(
    positions: Scheme, shifts: tuple[int, ...], zooms: tuple[float, ...]
) -> dict[str, Move]:
    """Return the functions that change an image's places, by name, if the scheme supports them."""
    moves: dict[str, Move] = {}
    if positions.can_forget:
        moves |= {f"shifted by {count}": partial(shifted_places, by=count) for count in shifts}
    if positions.takes_boxes:
        moves |= {f"the middle, x {zoom:g}": partial(middle_places, by=1 / zoom) for zoom in zooms}
    return {**moves, "no positions": no_places} if positions.can_forget else moves


@torch.no_grad()
def _encode(
    context: Context,
    model: PretrainModel,
    batch: Batch,
    settings: ShiftedPositions,
    move: Move | None = None,
) -> Tensor:
    """Return one feature (B, D) of each image, on the CPU."""
    vectors = []
    for part in in_parts(context, batch, settings.batch_size, "encoding"):
        images = model.images(part)[:, 0]
        places = model.encoder.places_of(images)
        places = places if move is None else move(places, images.device)
        tokens_BND = model.encoder(images, places=places)
        vectors.append(pool_tokens(model, tokens_BND, settings.features).cpu())
    return torch.cat(vectors)


@torch.no_grad()
def _encode_tiles(
    context: Context, model: PretrainModel, batch: Batch, mosaics_MT: Tensor, batch_size: int
) -> Tensor:
    """Return the mean (M, T, D) of every image's patches in its mosaic of T images, on the CPU."""
    side, prefix = math.isqrt(mosaics_MT.shape[1]), model.encoder.num_prefix_tokens
    tiles = {key: value[mosaics_MT.flatten()] for key, value in batch.items()}
    whole = max(1, batch_size // side**2) * side**2
    vectors = []
    for part in in_parts(context, tiles, whole, f"encoding, {side} x {side} images"):
        cut = model.images(part)[:, 0].unflatten(0, (-1, side, side))
        images_MCHW = cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        grid = model.encoder.grid_of(*images_MCHW.shape[-2:])
        patches_MND = model.encoder(images_MCHW)[:, prefix:].float()
        maps = patches_MND.unflatten(1, (side, grid[0] // side, side, grid[1] // side))
        vectors.append(maps.mean((2, 4)).flatten(1, 2).cpu())
    return torch.cat(vectors)


def _tile_figures(
    tiles_MTD: Tensor, mosaics_MT: Tensor, usual_BD: Tensor, labels_B: Tensor, k: int
) -> dict[str, float | None]:
    """Return ``_figures`` of images in mosaics, whose other images do not vote."""
    cosine = F.cosine_similarity(tiles_MTD, usual_BD[mosaics_MT], dim=-1).flatten()
    if not bool((labels_B >= 0).all()):
        return {**mean_and_error("cosine", cosine), "top1": None}
    right = []
    for tiles_TD, rows_T in zip(tiles_MTD, mosaics_MT, strict=True):
        votes_B = torch.ones(len(labels_B), dtype=torch.bool).index_fill(0, rows_T, False)
        predicted_T = nearest_class(
            tiles_TD, usual_BD[votes_B], labels_B[votes_B], k=k, temperature=TEMPERATURE
        )
        right.append(predicted_T == labels_B[rows_T])
    return {
        **mean_and_error("cosine", cosine),
        "top1": float(torch.cat(right).double().mean()),
    }


def _figures(
    disturbed_BD: Tensor, usual_BD: Tensor, labels_B: Tensor, k: int
) -> dict[str, float | None]:
    """Return the cosine and its standard error, and top-1 if there are classes and k others."""
    cosine_B = F.cosine_similarity(disturbed_BD, usual_BD)
    right = None
    if bool((labels_B >= 0).all()) and len(labels_B) > k:
        predicted_B = nearest_class(
            disturbed_BD, usual_BD, labels_B, k=k, temperature=TEMPERATURE, leave_one_out=True
        )
        right = float((predicted_B == labels_B).double().mean())
    return {**mean_and_error("cosine", cosine_B), "top1": right}


def _of_others(usual_BD: Tensor) -> dict[str, float | None]:
    """Return the mean cosine of all pairs of images' usual features, and its standard error.

    Each image is in a pair with all others, so its mean counts twice (a U-statistic's error).
    """
    unit_BD = F.normalize(usual_BD.double(), dim=-1)
    similarity = mean_and_error("cosine", (unit_BD @ unit_BD.sum(0) - 1) / (len(unit_BD) - 1))
    return {"cosine": similarity["cosine"], "cosine_se": 2 * similarity["cosine_se"], "top1": None}
