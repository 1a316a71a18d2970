"""The number of classes, and checks of a batch's labels."""

from collections.abc import Sequence

from torch import Tensor

from pospre.batch import LABEL, whole_numbers
from pospre.errors import UserError


def num_classes(told: int | None, classes: Sequence[str] | None, path: str) -> int:
    """Return the option ``num_classes``, or if it is None the number of the data's classes.

    Raises:
        UserError: the data at ``path`` has no labels, one class, or more classes than that.
    """
    if classes is None or len(classes) < 2:
        found = "no labels" if classes is None else f"one class, {classes[0]}"
        raise UserError(
            f"supervised needs two or more classes, but data.path = {path} has {found}; put "
            "the images into one folder per class."
        )
    if told is not None and told < len(classes):
        raise UserError(
            f"supervised.num_classes = {told}, but data.path = {path} has {len(classes)} "
            "classes; set it to null to take theirs."
        )
    return told or len(classes)


def checked_labels(labels_B: Tensor, classes: int | None) -> Tensor:
    """Return the labels as integers.

    Raises:
        UserError: they are not integers, or (if they are on the CPU) not in [0, classes).
    """
    labels = whole_numbers(labels_B, LABEL)
    if labels.is_cpu and classes and not ((labels >= 0) & (labels < classes)).all():
        wrong = labels[(labels < 0) | (labels >= classes)][0].item()
        raise UserError(
            f"algorithms.supervised has num_classes = {classes}, and a batch the label {wrong} "
            f"(-1: unknown). Give labels from 0 to {classes - 1}, or another num_classes."
        )
    return labels
