"""Correlation of features at two positions, within and across images (MP3, Fig. 10).

This is the Pearson correlation, over the features' channels, of every pair of positions: within an
image, averaged over images, and between two images. The latter is averaged over all pairs of
different images, which random pairs estimate: (Σz·Σz' − Σ z·z') / (M² − M) with standardised
features z. If features encode positions, they correlate more at the same position of different
images than elsewhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.batch import Batch
from pospre.evaluation.analysis.settings import PositionCorrelation
from pospre.evaluation.drawing import new_figure, save_arrays, save_figure
from pospre.evaluation.estimates import Estimate
from pospre.evaluation.features import centre_batches, check_images
from pospre.evaluation.layers import layer_tokens, planned_encoder
from pospre.evaluation.registry import Context, Plan

FIGURES = {"position": "max"}
GROUPS = 10  # that the jackknife leaves out in turn


def evaluate(context: Context, settings: PositionCorrelation) -> dict[str, Any]:
    """Correlate positions.

    Returns:
        Mean correlations, with jackknife standard errors over images (``…_se``): ``within``, of
        two positions of an image; ``same`` and ``other``, of two images at the same position and at
        two positions; ``position``, the former less the latter. The maps are in ``maps``, an
        archive beside the picture.
    """
    batches = centre_batches(context, settings)
    layer = context.model.encoder.depth if settings.layer is None else settings.layer
    sums = sum_features(_standardised(context, batches, layer))
    within_NN, across_NN = correlations(sums)
    grid = context.model.encoder.grid
    maps = {"within": within_NN.cpu(), "across": across_NN.cpu()}
    return {
        **estimates(sums),
        "layer": layer,
        "grid": list(grid),
        "samples": int(sums.count_G.sum()),
        **_draw(maps, grid, context.folder),
    }


def check(plan: Plan[PositionCorrelation]) -> None:
    """Raise a ``UserError`` for a layer that is not there, or fewer than two images."""
    wanted = plan.settings.layer
    planned_encoder(plan.recipe, None if wanted is None else [wanted])
    check_images(plan, 2)


@torch.no_grad()
def _standardised(context: Context, batches: Iterable[Batch], layer: int) -> Iterable[Tensor]:
    """Yield features (B, N, D) of the patches, each with mean 0 and length 1 over its channels."""
    model = context.model
    for batch in batches:
        (tokens_BTD,) = layer_tokens(model, model.images(batch)[:, 0], [layer])
        yield standardise(tokens_BTD[:, model.encoder.num_prefix_tokens :])


def standardise(features_BND: Tensor) -> Tensor:
    """Return float64 features whose dot products are Pearson correlations over the channels."""
    centred = features_BND.double() - features_BND.double().mean(-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True).clamp_min(1e-12)


@dataclass(frozen=True)
class Sums:
    """Sums over G groups of images: their count, features z, and z·z' of an image's positions."""

    count_G: Tensor
    features_GND: Tensor
    pairs_GNN: Tensor

    def without(self, group: int) -> "Sums":
        """Return the sums of the other groups."""
        rest = torch.arange(len(self.count_G)) != group
        return Sums(self.count_G[rest], self.features_GND[rest], self.pairs_GNN[rest])


def sum_features(batches: Iterable[Tensor]) -> Sums:
    """Sum standardised features (B, N, D); an image's group is its index modulo ``GROUPS``."""
    count, seen = [0] * GROUPS, 0
    features: list[Tensor | float] = [0.0] * GROUPS
    pairs: list[Tensor | float] = [0.0] * GROUPS
    for z_BND in batches:
        for group in range(GROUPS):
            z_bND = z_BND[(group - seen) % GROUPS :: GROUPS]
            count[group] += len(z_bND)
            features[group] = features[group] + z_bND.sum(0)
            pairs[group] = pairs[group] + torch.einsum("bnd,bmd->nm", z_bND, z_bND)
        seen += len(z_BND)
    some = [group for group in range(GROUPS) if count[group]]
    return Sums(
        torch.tensor([count[group] for group in some]),
        torch.stack([torch.as_tensor(features[group]) for group in some]),
        torch.stack([torch.as_tensor(pairs[group]) for group in some]),
    )


def correlations(sums: Sums) -> tuple[Tensor, Tensor]:
    """Return the mean correlations (N, N) of positions within an image, and across images."""
    images = int(sums.count_G.sum())
    features_ND, pairs_NN = sums.features_GND.sum(0), sums.pairs_GNN.sum(0)
    across_NN = (features_ND @ features_ND.T - pairs_NN) / (images * (images - 1))
    return pairs_NN / images, across_NN


def estimates(sums: Sums) -> dict[str, float | None]:
    """Return the mean correlations of ``evaluate`` with their standard errors (jackknife)."""
    results = _means(sums)
    errors: dict[str, float | None] = dict.fromkeys(f"{name}_se" for name in results)
    if int(sums.count_G.sum()) > 2:
        left = [_means(sums.without(group)) for group in range(len(sums.count_G))]
        for name in results:
            without = np.array([means[name] for means in left])
            errors[f"{name}_se"] = Estimate(results[name], without).error
    return {**results, **errors}


def _means(sums: Sums) -> dict[str, float]:
    within_NN, across_NN = correlations(sums)
    other = ~torch.eye(len(within_NN), dtype=torch.bool, device=within_NN.device)
    same = float(across_NN.diagonal().mean())
    elsewhere = float(across_NN[other].mean())
    return {
        "within": float(within_NN[other].mean()),
        "same": same,
        "other": elsewhere,
        "position": same - elsewhere,
    }


def _draw(maps: Mapping[str, Tensor], grid: tuple[int, int], folder: Path | None) -> dict[str, Any]:
    """Write the picture and the maps if there is a folder; return their names."""
    if folder is None:
        return {"pictures": [], "maps": None}
    figure = new_figure(13, 6.2)
    titles = {"within": "within an image", "across": "across images"}
    for axis, (name, map_NN) in zip(figure.subplots(1, 2), maps.items(), strict=True):
        others = map_NN[~torch.eye(len(map_NN), dtype=torch.bool)]
        low, high = float(others.min()), float(others.max())
        shown = axis.imshow(mosaic(map_NN, grid), vmin=low, vmax=high)
        figure.colorbar(shown, ax=axis, shrink=0.8)
        axis.set_title(f"{titles[name]}: each position's correlation with all")
        axis.set_axis_off()
    return {
        "pictures": [save_figure(figure, folder, "position_correlation.png")],
        "maps": save_arrays(maps, folder, "maps.npz"),
    }


def mosaic(map_NN: Tensor, grid: tuple[int, int]) -> np.ndarray:
    """Return a picture that shows each position's matrix row as a map; NaN in between."""
    rows, columns = grid
    picture = F.pad(map_NN.double().view(rows, columns, rows, columns), (0, 1, 0, 1), value=np.nan)
    return picture.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:-1, :-1].cpu().numpy()
