"""Matching of points by patch features, and PCK: the share of points that are found.

Points are (x, y) in pixels of a square image of ``size``; cell i of a row of patches of p pixels
has its centre at (i + ½)·p. ``coordinates`` are the conventions of published codes, which differ by
up to half the points: ``probe3d`` reads a point as if the outer cells' centres lay on the image's
edges and answers with the cell's corner, ``insid3`` takes the cell at round(x/p) and answers with
that cell's corner.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Coordinates = Literal["ours", "probe3d", "insid3"]
Match = Literal["argmax", "kernel"]
_SIGMA, _TEMPERATURE = 7.0, 0.04  # INSID3's: cells, and of the softmax


def read_points(
    map_DHW: Tensor, points_K2: Tensor, size: int, coordinates: Coordinates = "ours"
) -> Tensor:
    """Return a map's features at points, (K, D), each of length 1; outer points are clamped."""
    if coordinates == "insid3":
        rows, columns = map_DHW.shape[1:]
        sides = torch.tensor([columns, rows], device=points_K2.device)
        cells = (points_K2 / size * sides).round().long()
        cells = torch.minimum(cells.clamp_min(0), sides - 1)
        features = map_DHW[:, cells[:, 1], cells[:, 0]].T
    else:
        places = (points_K2 / size * 2 - 1)[None, None].to(map_DHW.dtype)
        features = F.grid_sample(
            map_DHW[None], places, padding_mode="border", align_corners=coordinates == "probe3d"
        )[0, :, 0].T
    return F.normalize(features, dim=1)


def match_points(
    source_KD: Tensor,
    target_DHW: Tensor,
    size: int,
    *,
    match: Match = "argmax",
    coordinates: Coordinates = "ours",
) -> Tensor:
    """Return the points (K, 2) of the target image whose features are most similar.

    ``argmax`` answers with a cell's centre; ``kernel`` with the mean of all centres, weighted by
    the softmax of the similarities under a Gaussian around the best cell.
    """
    rows, columns = target_DHW.shape[1:]
    similar_KN = source_KD @ F.normalize(target_DHW.flatten(1), dim=0)
    best_K = similar_KN.argmax(1)
    cells_N2 = torch.stack(
        torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1
    )
    cells_N2 = cells_N2.view(-1, 2).to(similar_KN)
    centre = cells_N2[best_K]
    if match == "kernel":
        far_KN = (cells_N2[None] - centre[:, None]).square().sum(2)
        weights = (similar_KN * (-far_KN / (2 * _SIGMA**2)).exp() / _TEMPERATURE).softmax(1)
        centre = weights @ cells_N2
    corner = 0.5 if coordinates == "ours" else 0.0
    return (centre + corner) * (size / torch.tensor([columns, rows]).to(centre))


def apply_homography(matrix_33: Tensor, points_K2: Tensor) -> Tensor:
    """Return points moved by a homography: (x, y, 1) times the matrix, divided by the third."""
    ones = points_K2.new_ones(len(points_K2), 1)
    moved = torch.cat([points_K2, ones], 1) @ matrix_33.to(points_K2).T
    return moved[:, :2] / moved[:, 2:]


def shares(errors: Sequence[Tensor], threshold: float) -> Tensor:
    """Return each pair's share of points found, (pairs,); ``errors`` are relative, per pair.

    A point counts if its error is at most the threshold.
    """
    return torch.stack([(each <= threshold).double().mean() for each in errors])


def per_point(errors: Sequence[Tensor], threshold: float) -> float:
    """Return the share of all points of all pairs whose error is below the threshold."""
    return float((torch.cat([*errors]) < threshold).double().mean())
