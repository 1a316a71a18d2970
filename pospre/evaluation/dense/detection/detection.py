"""Detection and instance segmentation: Mask R-CNN on a plain ViT, frozen or fine-tuned.

It uses ViTDet's simple feature pyramid and heads on the encoder's last layer (see ``mask_rcnn``),
as in DropPos and Intertwined. There are no windows and no relative positions. Published:
finetune=true, size=1024, 22 128 iterations of 64 images or 88 750 of 16, lr=1e-4 to 3e-4,
drop_path=0.1. It measures boxes, and masks if all objects have one; AP, AP50 and AP75 are
pycocotools'. Images are scaled so that their long side is ``size``, times ``jitter`` in training,
and padded to a square.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools import mask as coco_mask
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.models.detection import FasterRCNN
from torchvision.transforms import v2

from pospre.errors import UserError
from pospre.evaluation.dense.detection.average_precision import average_precision
from pospre.evaluation.dense.detection.box_data import open_boxes
from pospre.evaluation.dense.detection.box_set import BoxSet
from pospre.evaluation.dense.detection.mask_rcnn import build_detector, stride_of
from pospre.evaluation.dense.fitting import adamw, seeded, train_head
from pospre.evaluation.dense.images import check_apart, check_not_smaller, decoding_of
from pospre.evaluation.dense.maps import FeatureMaps, check_encoder, check_side
from pospre.evaluation.dense.settings import Detection
from pospre.evaluation.estimates import Estimate, with_differences
from pospre.evaluation.registry import UNTRAINED, Context, Plan
from pospre.model.model import PretrainModel
from pospre.schedules import linear, staircase

FIGURES = {"AP": "max", "AP50": "max", "mask_AP": "max"}
OWN_DATA = True
_RISE = 0.01  # share of the training, as 250 of 22 128
_MILESTONES = (8 / 9, 26 / 27)
_SCALED = 32  # number of images that determine the scale of features


class Setup(NamedTuple):
    """The data, and the side of padded images."""

    train: BoxSet
    val: BoxSet
    size: int

    @property
    def has_masks(self) -> bool:
        """Whether every object has a mask."""
        return self.train.has_masks and self.val.has_masks


def evaluate(context: Context, settings: Detection) -> dict[str, Any]:
    """Train a detector and measure it.

    Returns:
        ``AP``, ``AP50``, ``AP75`` and AP by size, in [0, 1], and ``classes``; the same of masks
        (``mask_…``; None without masks) and of the untrained encoder (``initial_…``). The first
        three have standard errors over images (``_se``, leaving out every tenth image in turn), and
        differences to the untrained encoder (``…_difference``) with paired ones.
    """
    setup: Setup = context.opened
    learn = context.models(baseline=settings.baseline)
    results: dict[str, Any] = dict.fromkeys(("mask_AP", f"{UNTRAINED}mask_AP"))
    measured: dict[str, dict[str, Estimate]] = {}
    for prefix, model in learn.items():
        with seeded(settings.seed, 0, 0, "detection/detector", context.device):
            detector, loss = _train(context, setup, model, settings, f"{prefix}detection")
        truth, detections = setup.val.coco(), _detect(context, setup, detector)
        measured[prefix], others = average_precision(truth, detections)
        if setup.has_masks:
            masks, more = average_precision(truth, detections, "segm")
            measured[prefix] |= {f"mask_{key}": figure for key, figure in masks.items()}
            others |= {f"mask_{key}": value for key, value in more.items()}
        results |= {f"{prefix}{key}": value for key, value in {"loss": loss, **others}.items()}
    return {
        **results,
        **with_differences(measured, images=len(setup.val)),
        "size": setup.size,
        "train_images": len(setup.train),
        "images": len(setup.val),
        "boxes": sum(map(len, setup.val.items)),
        "dropped_boxes": setup.train.dropped + setup.val.dropped,
        "empty_classes": _empty(setup),
    }


def check(plan: Plan[Detection]) -> Setup:
    """Return the data; raise a ``UserError`` for invalid annotations, classes or sizes."""
    encoder = check_encoder(plan)
    settings, patch = plan.settings, encoder.patch_size[0]
    decoding = decoding_of(plan.recipe)
    train = open_boxes(settings.bank or plan.data, settings.train_split, decoding=decoding)
    val = open_boxes(plan.data, settings.split, train.classes, decoding=decoding)
    val = val.of_half(settings.half)
    setup = Setup(train, val, settings.size or max(encoder.grid) * stride_of(patch))
    unit = 2 * stride_of(patch)
    if setup.size % unit:
        near = max(unit, round(setup.size / unit) * unit)
        raise UserError(f"size={setup.size} is not a multiple of {unit}; use {near}.")
    side = setup.size * patch // stride_of(patch)
    check_side("size", (side, side), encoder)
    check_apart(train.images, val.images, val.address)
    for part in (setup.train, setup.val):
        for path, sides in zip(part.images, part.sides, strict=True):
            factor = setup.size / max(sides)
            check_not_smaller(path, [each * factor for each in sides], patch)
    return setup


def missing(plan: Plan[Detection], opened: Setup) -> dict[str, str]:
    """Return why these data give no precision of masks, or none at all, by figure."""
    if all(item.crowd for items in opened.val.items for item in items):
        why = f"the {len(opened.val)} images to measure have no objects but crowds; give others"
        return dict.fromkeys(FIGURES, why)
    bare = [part.address for part in (opened.train, opened.val) if not part.has_masks]
    why = f"objects of {' and '.join(bare)} have no masks; add them, or use detection/AP"
    return {"mask_AP": why} if bare else {}


def images(opened: Setup) -> int:
    """Return the number of images to measure."""
    return len(opened.val)


def _empty(setup: Setup) -> list[str]:
    """Return the classes without training images."""
    shown = {item.label for items in setup.train.items for item in items if not item.crowd}
    return [name for label, name in enumerate(setup.train.classes, 1) if label not in shown]


class Jittered(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Squares by (epoch, index): large-scale jitter (Ghiasi et al. 2021) and mirroring.

    ``jitter`` is the range of the factor to the scale at which an image just fits ``size``. Draws
    are functions of (seed, epoch, index) alone. Crowds are left out.
    """

    def __init__(
        self,
        boxes: BoxSet,
        size: int,
        jitter: tuple[float, float],
        fill: tuple[int, ...],
        seed: int,
        has_masks: bool,
    ) -> None:
        self.boxes, self.seed, self.has_masks = boxes, seed, has_masks
        fills = {tv_tensors.Image: fill, tv_tensors.Mask: 0}
        self.cut = v2.Compose(
            [
                v2.ScaleJitter((size, size), jitter),
                v2.RandomCrop((size, size), pad_if_needed=True, fill=fills),
                v2.RandomHorizontalFlip(),
                v2.SanitizeBoundingBoxes(),
            ]
        )

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return uint8 (3, S, S), and boxes (x0, y0, x1, y1), labels and masks."""
        epoch, index = key
        pixels = self.boxes.image(index)
        items = [item for item in self.boxes.items[index] if not item.crowd]
        sides = self.boxes.sides[index]
        corners = torch.tensor([item.box for item in items]).reshape(-1, 4)
        target: dict[str, Tensor] = {
            "boxes": tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=sides),
            "labels": torch.tensor([item.label for item in items], dtype=torch.int64),
        }
        if self.has_masks:
            masks = np.zeros((len(items), *sides), np.uint8)
            for number, item in enumerate(items):
                masks[number] = item.read_mask()
            target["masks"] = tv_tensors.Mask(torch.from_numpy(masks))
        with seeded(self.seed, epoch, index, "detection/jitter"):
            image, target = self.cut(tv_tensors.Image(pixels), target)
        return image.as_subclass(Tensor), {k: v.as_subclass(Tensor) for k, v in target.items()}


def _train(
    context: Context, setup: Setup, model: PretrainModel, settings: Detection, title: str
) -> tuple[FasterRCNN, float]:
    """Return a trained detector, in eval mode, and the final loss."""
    maps = FeatureMaps(model, (model.encoder.depth,), norm=True, learned=settings)
    detector = build_detector(
        maps,
        len(setup.train.classes),
        size=setup.size,
        channels=settings.channels,
        regions=settings.regions,
        has_masks=setup.has_masks,
    ).to(context.device)
    shown = maps.fill, settings.seed, setup.has_masks
    if not settings.finetune:
        whole = Jittered(setup.train, setup.size, (1, 1), *shown)
        _standardize(context, detector, whole, settings.batch_size)

    def loss(batch: list[tuple[Tensor, dict[str, Tensor]]]) -> Tensor:
        images = [image.to(context.device) / 255 for image, _ in batch]
        wanted = [{key: each.to(context.device) for key, each in t.items()} for _, t in batch]
        return torch.stack(list(detector(images, wanted).values())).sum()

    optimizer, schedule = adamw(
        maps,
        detector,
        lambda share: (
            staircase(share, milestones=_MILESTONES, gamma=0.1) * linear(0.001, 1.0, share / _RISE)
        ),
        settings,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
    )
    samples = Jittered(setup.train, setup.size, settings.jitter, *shown)
    last = train_head(context, title, optimizer, schedule, samples, loss, settings, collate=list)
    return detector.eval(), last


def _standardize(
    context: Context, detector: FasterRCNN, samples: Jittered, batch_size: int
) -> None:
    """Set the scale of a frozen encoder's features from some images."""
    some = range(0, len(samples), max(1, len(samples) // _SCALED))

    def shown(indices: range) -> Tensor:
        images = [samples[0, index][0].to(context.device) / 255 for index in indices]
        return detector.transform(images)[0].tensors

    steps = range(0, len(some), batch_size)
    detector.backbone.standardize(shown(some[step : step + batch_size]) for step in steps)


@torch.no_grad()
def _detect(context: Context, setup: Setup, detector: FasterRCNN) -> list[dict[str, Any]]:
    """Return the detections as COCO results, in pixels of the images."""
    results = []
    for index in context.track(range(len(setup.val)), "detection", unit="img"):
        height, width = setup.val.sides[index]
        factor = setup.size / max(height, width)
        scaled = round(height * factor), round(width * factor)
        image = setup.val.image(index)[None].to(context.device) / 255
        image = F.interpolate(image, scaled, mode="bilinear", antialias=True)
        (detected,) = detector([image[0]])
        unit = detected["boxes"].new_tensor([width / scaled[1], height / scaled[0]] * 2)
        boxes = detected["boxes"] * unit
        boxes[:, 2:] -= boxes[:, :2]
        for row, (box, label, score) in enumerate(
            zip(
                boxes.tolist(),
                detected["labels"].tolist(),
                detected["scores"].tolist(),
                strict=True,
            )
        ):
            line = {"image_id": index + 1, "category_id": label, "bbox": box, "score": score}
            if "masks" in detected:
                mask = F.interpolate(detected["masks"][row][None], (height, width), mode="bilinear")
                line["segmentation"] = coco_mask.encode(
                    np.asfortranarray((mask[0, 0] > 0.5).byte().cpu().numpy())
                )
            results.append(line)
    return results
