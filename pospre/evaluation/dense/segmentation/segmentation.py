"""Semantic segmentation: a linear decoder or UperNet on a ViT, frozen or fine-tuned.

The decoder is trained on one split and measured on another: mIoU, aAcc and mAcc at the images' own
size. ``decoder=linear`` is batch norm and a 1×1 convolution on the patch tokens (published: DINOv2
frozen, 40 000 iterations; Intertwined finetune=true, 160 000). ``decoder=upernet`` is UperNet on
four layers, as in BEiT, MAE, DropPos and LUT (published: finetune=true, 80 000 or 160 000). All use
16 crops of 512, and drop_path=0.1 when fine-tuning. Training crops are scaled by 0.5 to 2 and
mirrored, without colour changes. The rate falls linearly after a short warm-up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix
from tqdm import tqdm

from pospre.errors import UserError
from pospre.evaluation.dense.fitting import adamw, seeded, train_head
from pospre.evaluation.dense.images import check_not_smaller, decoding_of, image_sides
from pospre.evaluation.dense.maps import FeatureMaps, check_encoder, check_side
from pospre.evaluation.dense.segmentation.crops import Crops, Encoded, Showing, predict, show
from pospre.evaluation.dense.segmentation.decoders import LinearDecoder, UperNet
from pospre.evaluation.dense.segmentation.mask_data import (
    IGNORED,
    MaskSet,
    check_masks,
    count_classes,
    open_masks,
)
from pospre.evaluation.dense.settings import Segmentation
from pospre.evaluation.estimates import Estimate, with_differences
from pospre.evaluation.registry import UNTRAINED, Context, Plan
from pospre.model.model import PretrainModel
from pospre.nn.vit import Encoder
from pospre.schedules import linear

FIGURES = {"mIoU": "max", "aAcc": "max"}
OWN_DATA = True
# learning rate and weight decay: DINOv2's linear probe; UperNet of MAE and LUT
_RATES = {"linear": (1e-3, 1e-4), "upernet": (1e-4, 0.05)}
_RISE = 0.01  # share of the training, as 1500 of 160 000


class Setup(NamedTuple):
    """The data, and settings derived from others."""

    train: MaskSet
    val: MaskSet
    num_classes: int
    showing: Showing
    crop: tuple[int, int]
    layers: tuple[int, ...]


def evaluate(context: Context, settings: Segmentation) -> dict[str, Any]:
    """Train a decoder and measure it.

    Returns:
        ``mIoU`` (over the classes that occur), ``aAcc`` and ``mAcc`` in [0, 1], their standard
        errors over images (``_se``), ``IoU`` by class; the same for the untrained encoder
        (``initial_…``), the differences to it (``…_difference``) with their paired errors and,
        without errors, for always predicting the most frequent class (``constant_…``); and what was
        measured.
    """
    setup: Setup = context.opened
    learn = context.models(baseline=settings.baseline)
    results: dict[str, Any] = {f"{UNTRAINED}IoU": None}
    measured: dict[str, dict[str, Estimate]] = {}
    names = setup.train.classes or [f"class {number}" for number in range(setup.num_classes)]
    for prefix, model in learn.items():
        with seeded(settings.seed, 0, 0, "segmentation/decoder", context.device):
            confusions_NCC, loss = _measure(
                context, setup, model, settings, f"{prefix}segmentation"
            )
        measured[prefix] = summarise(confusions_NCC)
        iou = class_iou(confusions_NCC.sum(0))
        classes = {key: _number(value) for key, value in zip(names, iou, strict=True)}
        results |= {f"{prefix}loss": loss, f"{prefix}IoU": classes}
    pixels = confusions_NCC.sum((0, 2))
    return {
        **with_differences(measured),
        **results,
        **constant(pixels),
        "layers": list(setup.layers),
        "crop": list(setup.crop),
        "train_images": len(setup.train),
        "images": len(setup.val),
        "classes": setup.num_classes,
        "absent": [name for name, count in zip(names, pixels, strict=True) if not count],
    }


def check(plan: Plan[Segmentation]) -> Setup:
    """Return the data; raise a ``UserError`` for invalid masks, classes, sizes or layers."""
    settings = plan.settings
    encoder = check_encoder(plan, settings.layers)
    setup = open_setup(plan, encoder)
    check_side("crop", setup.crop, encoder)
    if settings.decoder == "upernet":
        check_upernet(setup, settings.batch_size, encoder)
    if not settings.augment and settings.finetune:
        raise UserError(
            "augment=false needs a frozen encoder, which encodes each window only once; give "
            "finetune=false, or augment=true."
        )
    files = [*setup.train.images, *setup.val.images]
    for path in tqdm(files, "images", unit="img", disable=None, delay=2):
        scaled = setup.showing.scaled(*image_sides(path))
        check_not_smaller(path, scaled, encoder.patch_size[0])
    check_masks(setup.train, setup.val, setup.num_classes)
    return setup


def images(opened: Setup) -> int:
    """Return the number of images to measure."""
    return len(opened.val)


def _measure(
    context: Context, setup: Setup, model: PretrainModel, settings: Segmentation, title: str
) -> tuple[ndarray, float]:
    """Train a decoder on a model; return confusion matrices (N, C, C) and the training loss."""
    kind = settings.decoder
    maps = FeatureMaps(model, setup.layers, norm=kind == "linear", learned=settings)
    dim = model.encoder.embed_dim
    decoder: LinearDecoder | UperNet
    if kind == "linear":
        decoder = LinearDecoder(dim, len(setup.layers), setup.num_classes)
    else:
        decoder = UperNet(dim, setup.num_classes, settings.channels)
    decoder.to(context.device)
    samples, encode = _samples(context, setup, maps, settings)

    def loss(batch: list[Tensor]) -> Tensor:
        shown, classes_BHW = (each.to(context.device) for each in batch)
        return decoder.loss(encode(shown), classes_BHW)

    usual_lr, usual_decay = _RATES[kind]
    optimizer, schedule = adamw(
        maps,
        decoder,
        lambda share: min(linear(1.0, 0.0, share), linear(0.0, 1.0, (share + 1e-6) / _RISE)),
        settings,
        lr=settings.lr or usual_lr,
        weight_decay=usual_decay if settings.weight_decay is None else settings.weight_decay,
    )
    last = train_head(context, title, optimizer, schedule, samples, loss, settings)
    decoder.eval()
    matrices = _confusions(context, setup, maps, decoder, settings.batch_size)
    return matrices, last


def _samples(
    context: Context, setup: Setup, maps: FeatureMaps, settings: Segmentation
) -> tuple[Crops | Encoded, Callable[[Tensor], list[Tensor]]]:
    """Return the training samples, and the function that turns them into decoder inputs."""
    augment = maps.model.augment
    if settings.augment:
        size, seed = setup.showing.size, settings.seed
        crops = Crops(setup.train, setup.num_classes, size, setup.crop, maps.fill, seed)
        return crops, lambda levels: maps(augment.normalise(levels.float()))
    encoded = Encoded.of(context, setup.train, setup.num_classes, setup.showing, maps)
    return encoded, lambda joined: list(joined.unbind(dim=1))


@torch.no_grad()
def _confusions(
    context: Context,
    setup: Setup,
    maps: FeatureMaps,
    decoder: LinearDecoder | UperNet,
    batch_size: int,
) -> ndarray:
    """Return the confusion matrix of every image, int64 (N, C, C)."""
    matrices = []
    for index in context.track(range(len(setup.val)), "segmentation", unit="img"):
        image = show(maps.model, setup.val.image(index), setup.showing)
        logits = predict(lambda some: decoder(maps(some)), image, setup.showing, batch_size)
        classes_HW = torch.from_numpy(setup.val.read(index, setup.num_classes))
        rows, columns = setup.showing.scaled(*classes_HW.shape)
        logits = F.interpolate(logits[..., :rows, :columns], classes_HW.shape, mode="bilinear")
        matrix = multiclass_confusion_matrix(
            logits[0].argmax(0).cpu(),
            classes_HW,
            setup.num_classes,
            ignore_index=IGNORED,
            validate_args=False,
        )
        matrices.append(matrix.numpy())
    return np.stack(matrices)


def class_iou(confusion_CC: ndarray) -> ndarray:
    """Return the intersection over union of every class; NaN for classes that do not occur.

    The matrix has pixels by true class (rows) and predicted class.
    """
    right = np.diag(confusion_CC).astype(np.float64)
    union = confusion_CC.sum(0) + confusion_CC.sum(1) - right
    return np.divide(right, union, out=np.full_like(right, np.nan), where=union > 0)


def measures(confusion_CC: ndarray) -> dict[str, float]:
    """Return mIoU, the share of correct pixels (aAcc), and its mean over true classes (mAcc)."""
    right, true = np.diag(confusion_CC), confusion_CC.sum(1)
    return {
        "mIoU": float(np.nanmean(class_iou(confusion_CC))),
        "aAcc": float(right.sum() / true.sum()),
        "mAcc": float((right[true > 0] / true[true > 0]).mean()),
    }


def summarise(confusions_NCC: ndarray) -> dict[str, Estimate]:
    """Return the measures over all images, and without each."""
    total = confusions_NCC.sum(0)
    values, nothing = measures(total), dict.fromkeys(("mIoU", "aAcc", "mAcc"), np.nan)
    without = [measures(left) if left.any() else nothing for left in total - confusions_NCC]
    return {
        name: Estimate(value, np.array([each[name] for each in without]))
        for name, value in values.items()
    }


def constant(pixels_C: ndarray) -> dict[str, float]:
    """Return the metrics of always predicting the most frequent class (``constant_…``)."""
    share, present = float(pixels_C.max() / pixels_C.sum()), int((pixels_C > 0).sum())
    return {"constant_mIoU": share / present, "constant_aAcc": share, "constant_mAcc": 1 / present}


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def open_setup(plan: Plan[Segmentation], encoder: Encoder) -> Setup:
    """Open the data, and fill in settings that depend on others."""
    settings, decoding = plan.settings, decoding_of(plan.recipe)
    ignore, side = settings.ignore, settings.crop
    train = open_masks(settings.bank or plan.data, settings.train_split, ignore, decoding)
    val = open_masks(plan.data, settings.split, ignore, decoding).of_half(settings.half)
    crop = encoder.image_size if side is None else (side, side)
    depth = encoder.depth
    usual = {
        "linear": (depth,),
        "upernet": tuple(round(depth * share / 12) for share in (4, 6, 8, 12)),
    }
    return Setup(
        train,
        val,
        count_classes(train, settings.num_classes),
        Showing(settings.size, crop),
        crop,
        settings.layers or usual[settings.decoder],
    )


def check_upernet(setup: Setup, batch_size: int, encoder: Encoder) -> None:
    """Raise a ``UserError`` for layers, crops or batches that UperNet does not support."""
    if len(setup.layers) != 4:
        raise UserError(f"upernet takes four layers, not {list(setup.layers)}.")
    if min(setup.crop) < 2 * encoder.patch_size[0] or batch_size < 2:
        raise UserError(
            f"upernet needs crops of two patches and more ({setup.crop}, patches of "
            f"{encoder.patch_size[0]}) and batch_size=2 or more ({batch_size}) for its batch norms."
        )
