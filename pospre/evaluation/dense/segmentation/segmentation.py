"""Semantic segmentation: a linear decoder or UperNet on a ViT, frozen or fine-tuned.

The decoder learns from one split and is measured on another: mIoU, aAcc and mAcc at the images' own
size. ``decoder=linear`` is batch norm and a 1×1 convolution on the patch tokens (published: DINOv2
frozen, 40 000 iterations; Intertwined finetune=true, 160 000); ``decoder=upernet`` is UperNet on
four layers as in BEiT, MAE, DropPos and LUT (published: finetune=true, 80 000 or 160 000); all of
16 crops of 512, and drop_path=0.1 where the encoder learns. Training crops are scaled by 0.5 to 2
and mirrored, their colours stay, and the rate falls in a straight line after a short rise.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix
from tqdm import tqdm

from pospre.errors import UserError
from pospre.evaluation.dense.fitting import batches, fit, seeded, trained_groups
from pospre.evaluation.dense.images import check_not_smaller, image_sides, read_image
from pospre.evaluation.dense.maps import (
    FeatureMaps,
    check_drop_path,
    check_encoder,
    check_side,
)
from pospre.evaluation.dense.segmentation.crops import Crops, Encoded
from pospre.evaluation.dense.segmentation.decoders import LinearDecoder, UperNet
from pospre.evaluation.dense.segmentation.iou import class_iou, constant, summarise
from pospre.evaluation.dense.segmentation.mask_data import (
    IGNORED,
    check_masks,
)
from pospre.evaluation.dense.segmentation.setup import Setup, check_upernet, open_setup
from pospre.evaluation.dense.segmentation.windows import predict, show
from pospre.evaluation.registry import Context, Plan
from pospre.evaluation.settings import Numbers
from pospre.model.model import PretrainModel
from pospre.ranges import PositiveShare, Ratio
from pospre.schedules import linear
from pospre.text_table import format_table, percent, percent_and_error

FIGURES = {"mIoU": "max", "aAcc": "max"}
OWN_DATA = True
# learning rate and weight decay: DINOv2's linear probe; UperNet of MAE and LUT
_RATES = {"linear": (1e-3, 1e-4), "upernet": (1e-4, 0.05)}
_RISE = 0.01  # share of the training, as 1500 of 160 000


def evaluate(
    context: Context,
    *,
    bank: str | None = None,
    split: str = "val",
    train_split: str = "train",
    decoder: Literal["linear", "upernet"] = "linear",
    finetune: bool = False,
    layers: Numbers | None = None,
    num_classes: PositiveInt | None = None,
    ignore: NonNegativeInt | None = 255,
    size: PositiveInt | None = None,
    crop: PositiveInt | None = None,
    inference: Literal["slide", "whole"] = "slide",
    augment: bool = True,
    iterations: PositiveInt = 1000,
    batch_size: PositiveInt = 16,
    lr: PositiveFloat | None = None,
    weight_decay: NonNegativeFloat | None = None,
    layer_decay: PositiveShare = 0.65,
    drop_path: Ratio = 0.0,
    channels: PositiveInt = 512,
    num_workers: NonNegativeInt = 0,
    seed: int = 0,
    baseline: bool = True,
) -> dict[str, Any]:
    """Train a decoder and measure it.

    Args:
        context: model, data and device.
        bank: folder of the images to learn from, where that is another one than the data's.
        split: what is measured, such as val; scenes in one folder have none.
        train_split: what is learned from.
        decoder: linear, or upernet.
        finetune: let the encoder learn, too.
        layers: whose tokens the decoder gets, such as 3,6,9,12; without it the last one (linear),
            or four evenly spread (upernet). Only linear ones are normalised.
        num_classes: of the masks; ADE20K and scenes have their own, classes.txt says it, and
            else it is as many as the training masks show.
        ignore: the id in masks that has no class, such as 11 of CamVid; null: all have.
        size: pixels of the short side that images are scaled to; without it they stay as they are.
        crop: side of the training crops and of the windows; the encoder's own size without it.
        inference: slide a window over the image, by two thirds of it at a time and averaging what
            overlaps, or show the whole image, to a grid of its size.
        augment: draw crops. false: learn from the same windows as are measured; a frozen encoder
            then sees each of them only once, which takes a fraction of the time.
        iterations: steps of AdamW.
        batch_size: crops per step.
        lr: peak rate; 1e-3 (linear) or 1e-4 (upernet) without it.
        weight_decay: 1e-4 (linear) or 0.05 (upernet) without it.
        layer_decay: factor of the encoder's rate from each block to the one below.
        drop_path: rate of its last block, below 1; those before have less, the first none.
        channels: width of upernet.
        num_workers: processes that read crops; 0 reads in between.
        seed: of the decoder's weights and of the crops.
        baseline: train and measure on the untrained encoder of the same recipe as well.

    Returns:
        ``mIoU`` (over the classes that are there), ``aAcc`` and ``mAcc`` in [0, 1], their standard
        errors over images (``_se``), ``IoU`` by class; all of it for the untrained encoder
        (``initial_…``) and, without errors, for always saying the commonest class
        (``constant_…``); and what it was measured with.
    """
    given = dict(locals())
    setup: Setup = context.opened
    learn = context.models("trained", "initial", baseline=baseline)
    results: dict[str, Any] = dict.fromkeys(("initial_mIoU", "initial_aAcc", "initial_IoU"))
    names = setup.train.classes or [f"class {number}" for number in range(setup.num_classes)]
    for name, model in learn.items():
        with seeded(seed, 0, 0, "segmentation/decoder", context.device):
            confusions_NCC, loss = _measure(context, setup, model, given, name)
        found: dict[str, Any] = {**summarise(confusions_NCC), "loss": loss}
        iou = class_iou(confusions_NCC.sum(0))
        found["IoU"] = {key: _number(value) for key, value in zip(names, iou, strict=True)}
        prefix = "" if name == "trained" else f"{name}_"
        results |= {f"{prefix}{key}": value for key, value in found.items()}
    pixels = confusions_NCC.sum((0, 2))
    return {
        **results,
        **constant(pixels),
        "decoder": decoder,
        "finetune": finetune,
        "layers": list(setup.layers),
        "crop": list(setup.crop),
        "inference": inference,
        "iterations": iterations,
        "train_images": len(setup.train),
        "images": len(setup.val),
        "classes": setup.num_classes,
        "absent": [name for name, count in zip(names, pixels, strict=True) if not count],
    }


def check(plan: Plan) -> Setup:
    """Return the data; raise a ``UserError`` for masks, classes, sizes or layers that won't do."""
    settings = plan.settings
    encoder = check_encoder(plan.recipe, settings["layers"])
    check_drop_path(settings)
    setup = open_setup(plan.data, settings, encoder)
    check_side("crop", setup.crop, encoder)
    if setup.showing.window is None and not encoder.positions.takes_any_grid:
        raise UserError(
            f"inference=whole shows images of their own size, but encoder.positions = "
            f"{encoder.positions.name} knows one only; give inference=slide."
        )
    if settings["decoder"] == "upernet":
        check_upernet(setup, settings["batch_size"], encoder)
    if not settings["augment"] and (settings["finetune"] or setup.showing.window is None):
        raise UserError(
            "augment=false is for a frozen encoder and for windows, which it sees "
            "only once; give finetune=false and inference=slide, or augment=true."
        )
    files = [*setup.train.images, *setup.val.images]
    for path in tqdm(files, "images", unit="img", disable=None, delay=2):
        scaled = setup.showing.scaled(*image_sides(path))
        check_not_smaller(path, scaled, encoder.patch_size[0])
    check_masks(setup.train, setup.val, setup.num_classes)
    return setup


def _measure(
    context: Context, setup: Setup, model: PretrainModel, settings: Mapping[str, Any], title: str
) -> tuple[ndarray, float]:
    """Train a decoder on a model; return confusion matrices (N, C, C), and the training's loss."""
    kind = settings["decoder"]
    learns = {key: settings[key] for key in ("finetune", "drop_path", "seed")}
    maps = FeatureMaps(model, setup.layers, norm=kind == "linear", **learns)
    dim = model.encoder.embed_dim
    decoder: LinearDecoder | UperNet
    if kind == "linear":
        decoder = LinearDecoder(dim, len(setup.layers), setup.num_classes)
    else:
        decoder = UperNet(dim, setup.num_classes, settings["channels"])
    decoder.to(context.device)
    usual_lr, usual_decay = _RATES[kind]
    groups = trained_groups(
        maps,
        decoder,
        lr=settings["lr"] or usual_lr,
        weight_decay=usual_decay if settings["weight_decay"] is None else settings["weight_decay"],
        layer_decay=settings["layer_decay"],
    )
    samples, encode = _samples(context, setup, maps, settings)

    def loss(batch: list[Tensor]) -> Tensor:
        shown, classes_BHW = (each.to(context.device) for each in batch)
        return decoder.loss(encode(shown), classes_BHW)

    last = fit(
        context,
        f"segmentation, {title}",
        batches(
            samples,
            iterations=settings["iterations"],
            batch_size=settings["batch_size"],
            num_workers=settings["num_workers"],
            seed=settings["seed"],
        ),
        loss,
        groups,
        lambda share: min(linear(1.0, 0.0, share), linear(0.0, 1.0, (share + 1e-6) / _RISE)),
        settings["iterations"],
    )
    decoder.eval()
    matrices = _confusions(context, setup, maps, decoder, settings["batch_size"])
    return matrices, last


def _samples(
    context: Context, setup: Setup, maps: FeatureMaps, settings: Mapping[str, Any]
) -> tuple[Crops | Encoded, Callable[[Tensor], list[Tensor]]]:
    """Return what is learned from, and what makes the decoder's input of it."""
    augment = maps.model.augment
    if settings["augment"]:
        fill = tuple((255 * augment.mean.flatten()).round().int().tolist())
        crops = Crops(
            setup.train, setup.num_classes, setup.showing.size, setup.crop, fill, settings["seed"]
        )
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
    indices = tqdm(range(len(setup.val)), "segmentation", unit="img", disable=not context.progress)
    for index in indices:
        image = show(maps.model, read_image(setup.val.images[index]), setup.showing)
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
        context.go_on()
    return np.stack(matrices)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as text, in percent, with standard errors over images."""
    rows = [["trained", *_cells(results, "")]]
    if results["initial_mIoU"] is not None:
        rows.append(["untrained", *_cells(results, "initial_")])
    rows.append(["commonest class", *_cells(results, "constant_")])
    worst = sorted((value, key) for key, value in results["IoU"].items() if value is not None)
    how = "fine-tuned" if results["finetune"] else "frozen"
    notes = [
        f"{results['decoder']} decoder on layers {results['layers']}, {how}; "
        f"{results['iterations']} iterations, crops of {results['crop'][0]}×{results['crop'][1]}",
        f"{results['images']} images of {results['classes']} classes, learned from "
        f"{results['train_images']}; shown as {results['inference']}",
        "IoU by class: " + ", ".join(f"{key} {percent(value)}" for value, key in worst[::-1]),
    ]
    if results["absent"]:
        notes.append(f"not in the measured images: {', '.join(results['absent'])}")
    return format_table(
        "Semantic segmentation in %", ["encoder", "mIoU", "aAcc", "mAcc"], rows, notes
    )


def _cells(results: Mapping[str, Any], prefix: str) -> list[str]:
    names = [f"{prefix}{name}" for name in ("mIoU", "aAcc", "mAcc")]
    return [percent_and_error(results[name], results.get(f"{name}_se")) for name in names]
