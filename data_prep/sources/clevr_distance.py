"""CLEVR, by --source only; the label is the distance of the nearest object, in six ranges.

The ranges are those of the Visual Task Adaptation Benchmark (Zhai et al. 2019, arXiv 1910.04867):
the third number of ``pixel_coords`` is the depth from the camera.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from data_prep.files.tree import Tree
from data_prep.sources import clevr
from data_prep.sources.source import Source
from data_prep.splits import Split

_BORDERS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)


def detects(tree: Tree) -> bool:
    """Never detected: ``clevr`` is."""
    return False


def load(tree: Tree, split: Split) -> Source:
    """List a split as ``clevr`` does; scenes without objects have the label −1."""
    names = [f"{low:g} to {high:g}" for low, high in pairwise(_BORDERS)]
    return clevr.load_labelled(tree, split, _range, lambda _: names)


def _range(scene: Any) -> int:
    """Return the number of the nearest object's range, whose upper end is included."""
    depths = [thing["pixel_coords"][2] for thing in scene["objects"]]
    return int(np.searchsorted(_BORDERS, min(depths, default=-1.0))) - 1
