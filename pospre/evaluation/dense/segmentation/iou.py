"""Segmentation metrics from confusion matrices, one per image."""

import numpy as np
from numpy import ndarray

from pospre.evaluation.estimates import jackknife_error


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


def summarise(confusions_NCC: ndarray) -> dict[str, float]:
    """Return the measures over all images, each with its jackknife error over them (``_se``)."""
    total = confusions_NCC.sum(0)
    without = [measures(total - each) for each in confusions_NCC if (total - each).any()]
    results = measures(total)
    for name in tuple(results):
        values = [each[name] for each in without]
        results[f"{name}_se"] = jackknife_error(values, len(confusions_NCC))
    return results


def constant(pixels_C: ndarray) -> dict[str, float]:
    """Return the metrics of always predicting the most frequent class (``constant_…``)."""
    share, present = float(pixels_C.max() / pixels_C.sum()), int((pixels_C > 0).sum())
    return {
        "constant_mIoU": share / present,
        "constant_aAcc": share,
        "constant_mAcc": 1 / present,
    }
