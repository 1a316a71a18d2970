"""Depth from single images: a linear head on frozen patch tokens, as in DINOv3's protocol.

Batch norm and a 1×1 convolution to 256 bins on the last layer's normed patch tokens; SigLoss,
AdamW, one cycle of the rate. Every image is shown once, squashed to a square, and encoded once, so
there are no crops, rotations or colours in training: compare encoders with each other, not with
published figures. Metrics are averaged over images, at the size of the depths.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from pospre import draws
from pospre.errors import UserError
from pospre.evaluation.dense.depth.depth_data import SCENES_MAX, DepthSet, open_depths
from pospre.evaluation.dense.depth.depth_head import (
    METRICS,
    NEAREST,
    DepthHead,
    depth_metrics,
    sig_loss,
)
from pospre.evaluation.dense.fitting import seeded
from pospre.evaluation.dense.images import check_apart, decoding_of
from pospre.evaluation.dense.maps import FeatureMaps, check_encoder, check_side
from pospre.evaluation.dense.settings import Depth
from pospre.evaluation.estimates import Estimate, share, with_differences
from pospre.evaluation.registry import Context, Plan
from pospre.model.model import PretrainModel
from pospre.nn.sizes import pair

FIGURES = {"rmse": "min", "delta1": "max"}
OWN_DATA = True
_WARM = 100  # steps without the loss's variance
_CLIP = 35.0


class Setup(NamedTuple):
    """The data, the side of views, and the largest depth in metres."""

    train: DepthSet
    val: DepthSet
    size: int
    max_depth: float


def evaluate(context: Context, settings: Depth) -> dict[str, Any]:
    """Train a linear head on the encoder and measure it.

    Returns:
        ``rmse`` (metres), ``abs_rel``, ``delta1`` (share of pixels within a factor of 1.25),
        ``log10`` and ``silog`` with their standard errors over images (``_se``), the same for the
        untrained encoder (``initial_…``), the differences to it with their paired errors, and for
        one depth everywhere, the geometric mean of the training's (``constant_…``).
    """
    setup: Setup = context.opened
    figures, losses = {}, {}
    truths = [setup.val.depth(index, setup.max_depth) for index in range(len(setup.val))]
    for prefix, model in context.models(baseline=settings.baseline).items():
        with seeded(settings.seed, 0, 0, "depth/head", context.device):
            metrics_N5, loss = _measure(context, setup, model, truths, settings)
        figures[prefix], losses[f"{prefix}loss"] = _estimates(metrics_N5), loss
    constant = _constant(setup)
    same = [torch.full_like(truth, constant) for truth in truths]
    plain = _estimates(_all_metrics(same, truths))
    return {
        **with_differences(figures),
        **{f"constant_{name}": figure.value for name, figure in plain.items()},
        **losses,
        "protocol": "linear, images encoded once",
        "max_depth": setup.max_depth,
        "size": setup.size,
        "train_images": len(setup.train),
        "images": len(setup.val),
    }


def check(plan: Plan[Depth]) -> Setup:
    """Return the data; raise a ``UserError`` for invalid depths or sizes."""
    settings, decoding = plan.settings, decoding_of(plan.recipe)
    encoder = check_encoder(plan)
    size = settings.size or max(pair(plan.recipe.encoder.image_size))
    check_side("size", (size, size), encoder)
    train = open_depths(settings.bank or plan.data, settings.train_split, settings.scale, decoding)
    val = open_depths(plan.data, settings.split, settings.scale, decoding)
    check_apart(train.images, val.images, val.address)
    largest = max(float(train.measured(index).max()) for index in range(len(train)))
    usual = SCENES_MAX if train.is_rendered else largest
    max_depth = settings.max_depth or usual
    for data in (train, val):
        for index in range(len(data)):
            if not bool(data.depth(index, max_depth).any()):
                raise UserError(
                    f"{data.images[index]} has no depth between 0 and max_depth={max_depth:g} m; "
                    "leave it out, or give another max_depth=… or scale=…."
                )
    return Setup(train, val, size, max_depth)


def _measure(
    context: Context,
    setup: Setup,
    model: PretrainModel,
    truths: list[Tensor],
    settings: Depth,
) -> tuple[Tensor, float]:
    """Train a head on a model; return the metrics (N, 5) of every image, and the last loss."""
    train_NDHW = _encoded(context, setup, model)
    head = DepthHead(model.encoder.embed_dim, setup.max_depth).to(context.device)
    loss = _train(context, setup, head, train_NDHW, settings)
    head.eval()
    predicted = []
    with torch.no_grad():
        for map_DHW, truth in zip(
            _maps(context, setup.val, setup.size, model), truths, strict=True
        ):
            depth = head(map_DHW[None])
            shown = F.interpolate(depth, truth.shape, mode="bilinear")
            predicted.append(shown[0, 0].cpu().clamp(NEAREST, setup.max_depth))
    return _all_metrics(predicted, truths), loss


@torch.no_grad()
def _maps(context: Context, data: DepthSet, size: int, model: PretrainModel) -> Iterator[Tensor]:
    """Yield the map (D, h, w) of every image, squashed to a square."""
    maps = FeatureMaps(model, [model.encoder.depth], norm=True)
    for index in context.track(range(len(data)), "depth", unit="img"):
        levels = data.image(index)[None].float()
        shown = F.interpolate(levels, (size, size), mode="bilinear", antialias=True)
        yield maps(model.augment.normalise(shown.to(context.device)))[0][0]


def _encoded(context: Context, setup: Setup, model: PretrainModel) -> Tensor:
    """Return the maps (N, D, h, w) of all training images, on the CPU."""
    maps: list[Tensor] = []
    for one in _maps(context, setup.train, setup.size, model):
        maps.append(one.cpu())
        left = len(setup.train) - len(maps)
        if psutil.virtual_memory().available < one.nbytes * (left + len(setup.train)):
            raise UserError(
                f"the features of {len(setup.train)} images of {setup.train.address} do not fit "
                "into memory; give a bank=… of fewer images, or a smaller size=…."
            )
    return torch.stack(maps)


def _train(
    context: Context, setup: Setup, head: DepthHead, maps_NDHW: Tensor, settings: Depth
) -> float:
    """Train a head on maps; return the mean loss of the last tenth of the steps."""
    view = (setup.size, setup.size)
    depths = [setup.train.depth(index, setup.max_depth) for index in range(len(setup.train))]
    truth_NHW = torch.stack([F.interpolate(one[None, None], view)[0, 0] for one in depths])
    optimizer = torch.optim.AdamW(head.parameters(), lr=settings.lr, betas=(0.9, 0.99),
                                  weight_decay=1e-4)  # fmt: skip
    cycle = OneCycleLR(optimizer, settings.lr, settings.iterations, pct_start=1 / 3)
    losses: list[float] = []
    count, size = len(maps_NDHW), min(settings.batch_size, len(maps_NDHW))
    for step in context.track(range(settings.iterations), "depth", unit="it"):
        epoch, start = divmod(step * size, count - count % size)
        rows = torch.from_numpy(draws.order(settings.seed, epoch, count)[start : start + size])
        truth = truth_NHW[rows].to(context.device)
        with torch.enable_grad():
            depth = head(maps_NDHW[rows].to(context.device))
            shown = F.interpolate(depth, view, mode="bilinear")[:, 0]
            loss = sig_loss(shown[truth > 0], truth[truth > 0], warm=step < _WARM)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), _CLIP)
        optimizer.step()
        cycle.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, settings.iterations // 10) :]
    return sum(last) / len(last)


def _all_metrics(predicted: list[Tensor], truths: list[Tensor]) -> Tensor:
    """Return the metrics (N, 5) over the pixels of each image that have a truth."""
    return torch.stack(
        [
            depth_metrics(one[truth > 0], truth[truth > 0])
            for one, truth in zip(predicted, truths, strict=True)
        ]
    )


def _estimates(metrics_N5: Tensor) -> dict[str, Estimate]:
    ones = torch.ones(len(metrics_N5))
    return {
        name: share(values_N, ones) for name, values_N in zip(METRICS, metrics_N5.T, strict=True)
    }


def _constant(setup: Setup) -> float:
    """Return the geometric mean of all depths of the training."""
    total, count = 0.0, 0
    for index in range(len(setup.train)):
        depth = setup.train.depth(index, setup.max_depth)
        known = depth[depth > 0].double()
        total, count = total + float(known.log().sum()), count + len(known)
    return float(torch.tensor(total / count).exp())
