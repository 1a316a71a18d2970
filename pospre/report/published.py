"""Figures of the papers that a run's own are shown beside: yamls/PAPERS.md has all of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pospre.report.run import Run
from pospre.untrusted_json import is_number

_IMAGENET = 1_281_167  # images to train on
_LINEAR = {"classes": 1000, "query_samples": 50_000, "label_fraction": 1.0, "augment": True}
_MAE_LINEAR = {**_LINEAR, "protocol": "mae"}
_VISSL_LINEAR = {**_LINEAR, "protocol": "vissl", "weights": "teacher"}
_ADE20K = {"classes": 150, "images": 2000, "finetune": True}
_UPERNET = {**_ADE20K, "decoder": "upernet"}
_SEGMENTED = {**_ADE20K, "decoder": "linear", "weights": "teacher"}
_COCO = {"images": 5000, "finetune": True}
_DETECTED = {**_COCO, "weights": "teacher"}
_PROBE = {"num_samples": 4000, "num_tokens": 196}
_TABLES = (None, "sincos", "learned")  # the encoder's positions of all these papers; None: sincos


class Published(NamedTuple):
    """A figure of a paper, of a ViT-B/16 that was trained on ImageNet-1k.

    Attributes:
        methods: the algorithms of the recipe; the last is whose paper it is.
        epochs: that it was trained.
        evaluation: what measured it.
        percent: its value.
        words: what it is of.
        protocol: what the results or settings of the evaluation say where it was the paper's.
    """

    methods: tuple[str, ...]
    epochs: int
    evaluation: str
    percent: str
    words: str
    protocol: Mapping[str, Any]


_STOP = ("ijepa", "stop")
_LUT = ("mae", "lut")
_BOTH = ("dinov2", "crop_field", "masked_position")
PUBLISHED = (
    Published(("droppos",), 200, "position_grid", "87.83", "weighted mean", {"samples": 50_000}),
    Published(("droppos",), 200, "segmentation", "40.7", "mIoU", _UPERNET),
    Published(("droppos",), 200, "detection", "42.1", "AP", _COCO),
    Published(("droppos",), 800, "position_probe", "77.3", "masked_top1", _PROBE),
    Published(("mae",), 1600, "position_probe", "63.1", "masked_top1", _PROBE),
    Published(("mae",), 1600, "linear", "68.0", "top1", _MAE_LINEAR),
    Published(("ijepa",), 600, "linear", "70.9", "top1", _VISSL_LINEAR),
    Published(_STOP, 600, "linear", "72.6", "top1", _VISSL_LINEAR),
    Published(_LUT, 400, "linear", "67.9", "top1", _MAE_LINEAR),
    Published(_LUT, 1600, "segmentation", "49.5", "mIoU", _UPERNET),
    Published(("dinov2",), 100, "detection", "47.7", "AP", _DETECTED),
    Published(("dinov2",), 100, "segmentation", "47.5", "mIoU", _SEGMENTED),
    Published(_BOTH, 100, "detection", "49.2", "AP", _DETECTED),
    Published(_BOTH, 100, "segmentation", "48.4", "mIoU", _SEGMENTED),
)


def published_beside(run: Run, name: str) -> list[str]:
    """Return what the papers report for what evaluation ``name`` has measured, in words.

    Only figures that compare: of the same model, trained by the same methods on as many images of
    ImageNet, and measured by the same protocol.
    """
    document = run.evaluations.get(name, {})
    measured = {**document, **document.get("settings", {}), **document.get("results", {})}
    return [
        f"published for {found.methods[-1]}: {found.percent} % ({found.words}; ViT-B/16, "
        f"{found.epochs} epochs of ImageNet-1k)"
        for found in PUBLISHED
        if measured.get("name") == found.evaluation
        and found.protocol.items() <= {key: measured.get(key) for key in found.protocol}.items()
        and _is_trained_as(run, found)
    ]


def _is_trained_as(run: Run, found: Published) -> bool:
    keys = ("name", "image_size", "depth", "positions")
    encoder = {key: run.setting("encoder", key) for key in keys}
    if encoder["name"] != "vitb16" or encoder["image_size"] not in (None, 224, [224, 224]):
        return False
    samples = [record["samples"] for record in run.records if is_number(record.get("samples"))]
    wanted = found.epochs * _IMAGENET
    return (
        encoder["depth"] in (None, 12)
        and encoder["positions"] in _TABLES
        and sorted(run.algorithms) == sorted(found.methods)
        and bool(samples)
        and abs(samples[-1] - wanted) < 0.01 * wanted
    )
