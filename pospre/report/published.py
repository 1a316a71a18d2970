"""Figures of the papers that a run's own are shown beside: yamls/PAPERS.md has all of them."""

from typing import NamedTuple

from pospre.report.run import Run


class Published(NamedTuple):
    """A figure of a paper.

    Attributes:
        method: the algorithm it is of.
        evaluation: what measured it.
        percent: its value.
        conditions: of the model that it was measured of.
    """

    method: str
    evaluation: str
    percent: str
    conditions: str


PUBLISHED = (
    Published("droppos", "position_grid", "87.83", "ViT-B/16, 200 epochs of ImageNet-1k"),
    Published("droppos", "segmentation", "40.7", "ViT-B/16, UperNet on ADE20k"),
    Published("droppos", "detection", "42.1", "ViT-B/16, COCO"),
    Published("droppos", "position_probe", "77.3", "ViT-B/16; of masked_top1"),
    Published("mae", "position_probe", "63.1", "ViT-B/16; of masked_top1"),
    Published("mae", "linear", "68.0", "ViT-B/16, 1600 epochs of ImageNet-1k"),
    Published("ijepa", "linear", "70.9", "ViT-B/16, 600 epochs of ImageNet-1k"),
    Published("stop", "linear", "72.6", "ViT-B/16, 600 epochs of ImageNet-1k"),
    Published("lut", "linear", "67.9", "ViT-B/16, 400 epochs of ImageNet-1k"),
    Published("lut", "segmentation", "49.5", "ViT-B/16, UperNet on ADE20k"),
    Published("dinov2", "detection", "47.7", "ViT-B/16, COCO"),
    Published("dinov2", "segmentation", "47.5", "ViT-B/16, linear decoder on ADE20k"),
    Published("masked_position", "detection", "49.2", "ViT-B/16, COCO"),
    Published("masked_position", "segmentation", "48.4", "ViT-B/16, linear, ADE20k"),
)


def published_beside(run: Run, evaluation: str) -> list[str]:
    """Return what the papers of the run's algorithms report for an evaluation, in words."""
    return [
        f"published for {found.method}: {found.percent} % ({found.conditions})"
        for found in PUBLISHED
        if found.method in run.algorithms and found.evaluation == evaluation
    ]
