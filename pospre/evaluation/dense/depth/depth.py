"""Depth from single images: a linear head on frozen patch tokens.

``protocol=look`` has the head, the loss and the optimiser of DINOv3's protocol, but every image is
shown once, squashed to a square, and encoded once: compare encoders by it, not with published
figures. ``dinov3``, ``dinov2`` and ``pixio`` train on crops and test as published; their figures
are not comparable with each other. Metrics are averaged over images, at the size of the depths.
None of them looks at the measured images during training.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from pospre.errors import UserError
from pospre.evaluation.dense.depth.depth_data import (
    SCENES_MAX,
    DepthSet,
    Known,
    open_depths,
    read_depths,
)
from pospre.evaluation.dense.depth.depth_head import (
    METRICS,
    NEAREST,
    depth_metrics,
    sig_loss,
    silog_loss,
)
from pospre.evaluation.dense.depth.protocols import (
    EIGEN,
    PROTOCOLS,
    DepthCrops,
    Protocol,
    depths_of,
    depths_to_measure,
    whole_or,
)
from pospre.evaluation.dense.fitting import Fit, seeded, train_head
from pospre.evaluation.dense.images import check_apart, decoding_of, image_sides
from pospre.evaluation.dense.maps import FeatureMaps, check_encoder, check_side
from pospre.evaluation.dense.segmentation.crops import Encoded
from pospre.evaluation.dense.settings import Depth
from pospre.evaluation.estimates import compared, mean_and_error
from pospre.evaluation.registry import Context, Plan
from pospre.model.model import PretrainModel
from pospre.nn.sizes import pair
from pospre.nn.vit import Encoder

FIGURES = {"rmse": "min", "delta1": "max"}
MEASURED_IN = {"rmse": "m"}
OWN_DATA = True
_PLAUSIBLE = (0.3, 1000.0)  # metres; else values are taken for another unit
_WARM = 100  # steps without the loss's variance
_CLIP = 35.0


class Setup(NamedTuple):
    """The data, and settings derived from others.

    Attributes:
        truths: of the measured images, where they are measured.
        view: height and width of a look's views, or of crops.
        max_depth: in metres.
    """

    protocol: Protocol
    train: DepthSet
    val: DepthSet
    known: Known
    truths: list[Tensor]
    view: tuple[int, int]
    layers: tuple[int, ...]
    max_depth: float
    fit: Fit
    lr: float


def evaluate(context: Context, settings: Depth) -> dict[str, Any]:
    """Train a linear head on the encoder and measure it.

    Returns:
        ``rmse`` (metres), ``abs_rel``, ``delta1`` (share of pixels within a factor of 1.25),
        ``log10`` and ``silog`` with their standard errors over images (``_se``), the same for the
        untrained encoder (``initial_…``), the differences to it with their paired errors, and for
        one depth everywhere, the geometric mean of the training's (``constant_…``).
    """
    setup: Setup = context.opened
    measured, losses = {}, {}
    for prefix, model in context.models(baseline=settings.baseline).items():
        with seeded(settings.seed, 0, 0, "depth/head", context.device):
            measured[prefix], loss = _measure(context, setup, model, f"{prefix}depth")
        losses[f"{prefix}loss"] = loss
    constant = [torch.full_like(truth, setup.known.mean) for truth in setup.truths]
    plain_5 = _metrics(constant, setup.truths).mean(0).tolist()
    results: dict[str, Any] = {}
    for number, name in enumerate(METRICS):
        of_models = {prefix: values_N5[:, number] for prefix, values_N5 in measured.items()}
        for prefix, values_N in of_models.items():
            results |= mean_and_error(f"{prefix}{name}", values_N)
        results |= compared(name, of_models)
    return {
        **results,
        **{f"constant_{name}": value for name, value in zip(METRICS, plain_5, strict=True)},
        **losses,
        "protocol": settings.protocol,
        "max_depth": setup.max_depth,
        "view": list(setup.view),
        "layers": list(setup.layers),
        "iterations": setup.fit.iterations,
        "train_images": len(setup.train),
        "images": len(setup.val),
    }


def check(plan: Plan[Depth]) -> Setup:
    """Return the data; raise a ``UserError`` for invalid depths or sizes."""
    settings, decoding = plan.settings, decoding_of(plan.recipe)
    protocol = PROTOCOLS[settings.protocol]
    encoder = check_encoder(plan, settings.layers)
    train = open_depths(settings.bank or plan.data, settings.train_split, settings.scale, decoding)
    val = open_depths(plan.data, settings.split, settings.scale, decoding).of_half(settings.half)
    check_apart(train.images, val.images, val.address)
    view = _view(plan, protocol, encoder, train)
    usual = SCENES_MAX if train.is_rendered else math.inf
    known = read_depths(train, settings.max_depth or usual, view if protocol.crop is None else None)
    max_depth = settings.max_depth or (usual if train.is_rendered else _plausible(known, settings))
    truths = [val.known(index, max_depth)[whole_or(EIGEN, val, index)] for index in range(len(val))]
    batch_size = min(settings.batch_size or protocol.batch_size, len(train))
    steps = protocol.iterations
    if protocol.epochs is not None:
        steps = protocol.epochs * (len(train) // batch_size)
    fit = Fit(settings.iterations or steps, batch_size, settings.num_workers, settings.seed)
    layers = settings.layers or (encoder.depth,)
    lr = settings.lr or protocol.lr
    return Setup(protocol, train, val, known, truths, view, layers, max_depth, fit, lr)


def _plausible(known: Known, settings: Depth) -> float:
    """Return the training's largest depth; raise a ``UserError`` if it is hardly in metres."""
    nearest, farthest = _PLAUSIBLE
    if not nearest <= known.largest <= farthest:
        raise UserError(
            f"the training's largest depth is {known.largest:g} m: .npy files hold metres, PNGs "
            f"scale={settings.scale:g} values per metre. Give another scale=…, or "
            f"max_depth={known.largest:g} if it is right."
        )
    return known.largest


def images(opened: Setup) -> int:
    """Return the number of images to measure."""
    return len(opened.val)


def _view(
    plan: Plan[Depth], protocol: Protocol, encoder: Encoder, train: DepthSet
) -> tuple[int, int]:
    """Return the sides of a look's views, or of crops; raise a ``UserError`` if they do not fit."""
    settings = plan.settings
    wrong = "crop" if protocol.crop is None else "size"
    if getattr(settings, wrong) is not None:
        other = "size" if wrong == "crop" else "crop"
        raise UserError(f"{wrong}=… does not belong to protocol={settings.protocol}; use {other}.")
    if protocol.class_token and not encoder.has_class_token:
        raise UserError(
            f"protocol={settings.protocol} reads the class token, which this encoder does not "
            "have; use look or dinov3."
        )
    if protocol.crop is None:
        size = settings.size or max(pair(plan.recipe.encoder.image_size))
        check_side("size", (size, size), encoder)
        return size, size
    if not encoder.positions.takes_any_grid:
        raise UserError(
            f"protocol={settings.protocol} has views of several sizes, but encoder.positions = "
            f"{encoder.positions.name} supports only one; use look."
        )
    crop = settings.crop or protocol.crop
    for path in train.images:
        sides = image_sides(path)
        if sides[0] < crop[0] or sides[1] < crop[1]:
            raise UserError(
                f"{path} has {sides[0]}×{sides[1]} pixels, less than crops of {crop[0]}×{crop[1]}; "
                "give a smaller crop=…, or use look."
            )
    return crop


def _measure(
    context: Context, setup: Setup, model: PretrainModel, title: str
) -> tuple[Tensor, float]:
    """Train a head on a model; return the metrics (N, 5) of every image, and the last loss."""
    protocol = setup.protocol
    maps = protocol.maps(model, setup.layers)
    head = protocol.head(maps, setup.max_depth).to(context.device)
    loss = _train(context, setup, maps, head, title)
    head.eval()
    with torch.no_grad():
        found = [
            each.cpu().clamp(NEAREST, setup.max_depth)
            for each in _predictions(context, setup, maps, head)
        ]
    return _metrics(found, setup.truths), loss


def _predictions(
    context: Context, setup: Setup, maps: FeatureMaps, head: nn.Module
) -> Iterator[Tensor]:
    """Yield the depths of every measured image, where it is measured."""
    if setup.protocol.crop is None:
        encoded = _encoded(context, setup.val, setup.view, maps)
        for index, map_DHW in enumerate(encoded):
            depth = head(map_DHW[None], image_sides(setup.val.images[index]))
            yield depth[0, 0][whole_or(EIGEN, setup.val, index)]
        return
    for index in context.track(range(len(setup.val)), "depth", unit="img"):
        levels = setup.val.image(index)[None].to(context.device)
        image = maps.model.augment.normalise(levels)
        box = whole_or(EIGEN, setup.val, index)
        yield depths_to_measure(setup.protocol, maps, head, image, box, setup.view)


@torch.no_grad()
def _encoded(
    context: Context, data: DepthSet, view: tuple[int, int], maps: FeatureMaps
) -> Iterator[Tensor]:
    """Yield the map (D, h, w) of every image, squashed to a view."""
    for index in context.track(range(len(data)), "depth", unit="img"):
        levels = data.image(index)[None].float()
        shown = F.interpolate(levels, view, mode="bilinear", antialias=True)
        yield torch.cat(maps(maps.model.augment.normalise(shown.to(context.device))), 1)[0]


def _train(context: Context, setup: Setup, maps: FeatureMaps, head: nn.Module, title: str) -> float:
    """Train a head; return the mean loss of the last tenth of the steps."""
    protocol, steps = setup.protocol, itertools.count()
    samples: Dataset[Any]
    if protocol.crop is None:
        samples = Encoded([*zip(_kept(context, setup, maps), setup.known.small, strict=True)])
    else:
        augment = not protocol.is_share
        samples = DepthCrops(
            setup.train, setup.max_depth, setup.view, setup.fit.seed, augment=augment
        )

    def loss(batch: list[Tensor]) -> Tensor:
        shown, truth_BHW = (each.to(context.device) for each in batch)
        if protocol.crop is None:
            depth_BHW = head(shown, setup.view)[:, 0]
        else:
            depth_BHW = depths_of(maps, head, maps.model.augment.normalise(shown))[:, 0]
        known, is_warm = truth_BHW > 0, next(steps) < _WARM
        if int(known.sum()) < 2:  # crops beside sparse depths
            return 0 * depth_BHW.sum()
        if protocol.is_share:
            return silog_loss(depth_BHW[known], truth_BHW[known])
        return sig_loss(depth_BHW[known], truth_BHW[known], warm=is_warm)

    optimizer, schedule = protocol.optimizer(head, setup.lr, setup.fit.iterations)
    clip = math.inf if protocol.is_share else _CLIP
    return train_head(context, title, optimizer, schedule, samples, loss, setup.fit, clip=clip)


def _kept(context: Context, setup: Setup, maps: FeatureMaps) -> list[Tensor]:
    """Return the maps (D, h, w) of all training images, on the CPU."""
    kept: list[Tensor] = []
    for one in _encoded(context, setup.train, setup.view, maps):
        kept.append(one.cpu())
        left = len(setup.train) - len(kept)
        if psutil.virtual_memory().available < one.nbytes * (left + len(setup.train)):
            raise UserError(
                f"the features of {len(setup.train)} images of {setup.train.address} do not fit "
                "into memory; give a bank=… of fewer images, or a smaller size=…."
            )
    return kept


def _metrics(found: list[Tensor], truths: list[Tensor]) -> Tensor:
    """Return the metrics (N, 5) over the pixels of each image that have a truth."""
    return torch.stack(
        [
            depth_metrics(one[truth > 0], truth[truth > 0])
            for one, truth in zip(found, truths, strict=True)
        ]
    )
