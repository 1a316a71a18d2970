"""Average precision as COCO defines it (pycocotools), also without some of the images."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy import ndarray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from pospre.evaluation.estimates import Estimate

FIGURES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
GROUPS = 10
_IOUS = {"AP": slice(None), "AP50": slice(0, 1), "AP75": slice(5, 6)}


def average_precision(
    truth: Mapping[str, Any],
    detections: Sequence[Mapping[str, Any]],
    kind: Literal["bbox", "segm"] = "bbox",
) -> tuple[dict[str, Estimate], dict[str, Any]]:
    """Return COCO's figures for COCO annotations and results.

    Of ``segm``, the size of a result is that of its mask.

    Returns:
        ``AP`` (mean over IoU 0.5 to 0.95), ``AP50`` and ``AP75``, in [0, 1], also without every
        tenth image in turn. Then AP by size and, in ``classes``, of each class by name; None for
        those without objects.
    """
    if kind == "segm":  # pycocotools would take the area of a result's box
        detections = [{k: v for k, v in each.items() if k != "bbox"} for each in detections]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        coco = _index(truth)
        nothing = _index({**truth, "annotations": []})
        predicted = coco.loadRes(list(detections)) if detections else nothing
        run = COCOeval(coco, predicted, kind)
        run.evaluate()
        run.accumulate()
        run.summarize()
        stats = (None if value < 0 else float(value) for value in run.stats)
        figures = dict(zip(FIGURES, stats, strict=False))
        precision = run.eval["precision"]
        classes = {
            each["name"]: _mean(precision[:, :, index, 0, -1])
            for index, each in enumerate(truth["categories"])
        }
        without = _left_out(run, len(truth["images"]))
    known = {
        key: Estimate(value, without[key]) for key in _IOUS if (value := figures[key]) is not None
    }
    return known, {**{key: figures[key] for key in figures if key not in known}, "classes": classes}


def _left_out(run: COCOeval, num_images: int) -> dict[str, ndarray]:
    """Return the first three figures without each group of images."""
    matches = run.evalImgs  # by class, then by size, then by image
    groups = min(GROUPS, num_images)
    without = {key: np.full(groups, np.nan) for key in _IOUS}
    for group in range(groups):
        run.evalImgs = [
            None if index % num_images % groups == group else match
            for index, match in enumerate(matches)
        ]
        run.accumulate()
        for key, ious in _IOUS.items():
            value = _mean(run.eval["precision"][ious, :, :, 0, -1])
            without[key][group] = np.nan if value is None else value
    return without


def _index(annotations: Mapping[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = dict(annotations)
    coco.createIndex()
    return coco


def _mean(precision: ndarray) -> float | None:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else None
