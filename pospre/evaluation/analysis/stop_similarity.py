"""Similarity of StoP's stochastic positions to the fixed ones (Bar et al. 2024, Fig. 5).

The query at position i is ψ_i + A·n, n ~ N(0, s²·I), as in the predictor's mask tokens during
training (the context's tokens with ``variant: context``; s·ε with ``fixed_cov``). Its cosine
similarity to every ψ_k is a map over the grid: without noise, for one draw, and averaged over
draws. No images are used.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre import draws
from pospre.algorithms.stop.stop import NOISE, Noisy, StochasticPredictor, StoP
from pospre.errors import UserError
from pospre.evaluation.analysis.settings import StopSimilarity
from pospre.evaluation.drawing import Cell, as_map, draw_cells, save_figure
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.isolated_method import method_in
from pospre.evaluation.layers import check_queries, planned_encoder, three_patches
from pospre.evaluation.registry import Context, Plan
from pospre.model.algorithm import method_of
from pospre.nn.grid import grid_distances
from pospre.nn.places import Places

NEEDS = StoP
FIGURES = {"distance": "max"}


def evaluate(context: Context, settings: StopSimilarity) -> dict[str, Any]:
    """Compare stochastic positions with the fixed ones.

    Returns:
        Means over positions and draws, with standard errors over draws (``…_se``): ``own``, the
        similarity of a query to its own position; ``nearest``, the share of queries most similar to
        it; ``distance``, in patches, from it to the most similar position.
    """
    method: Any = method_in(context.model, NEEDS)
    predictor: StochasticPredictor = context.model.objectives.of(Noisy).predictor
    with torch.no_grad():
        vectors = predictor.positions.embed(Places(predictor.grid))
        assert vectors is not None  # stop refuses others
        position_ND = vectors[0].float()
        grid = context.model.encoder.grid
        asked = list(settings.queries or three_patches(grid))
        add = partial(noise, predictor, len(position_ND), settings.seed)
        moved = (position_ND + add(draw) for draw in range(settings.num_draws))
        similarity_SNN = torch.stack([similarity(each, position_ND) for each in moved])
        fixed_NN = similarity(position_ND, position_ND)
    distance_NN = grid_distances(*grid, squared=False).to(position_ND)
    best_SN = similarity_SNN.argmax(-1)
    place_N = torch.arange(len(position_ND), device=best_SN.device)
    return {
        **mean_and_error("own", similarity_SNN.diagonal(dim1=1, dim2=2).mean(1)),
        **mean_and_error("nearest", (best_SN == place_N).double().mean(1)),
        **mean_and_error("distance", distance_NN[place_N, best_SN].mean(1)),
        "variant": method.variant,
        "noise_std": predictor.noise_std,
        "grid": list(grid),
        "queries": asked,
        "pictures": _draw(fixed_NN, similarity_SNN, asked, grid, context.folder),
    }


def check(plan: Plan[StopSimilarity]) -> None:
    """Raise a ``UserError`` for a variant without noise, or invalid positions."""
    _, options = method_of(plan.recipe.algorithms, NEEDS) or ("", {})
    variant = options.get("variant", StoP.variant)
    if variant not in NOISE:
        raise UserError(
            f"stop.variant = {variant} adds no noise to positions; {', '.join(NOISE)} do."
        )
    grid = planned_encoder(plan.recipe).grid
    check_queries(plan.settings.queries or (), grid)


def noise(predictor: StochasticPredictor, num_positions: int, seed: int, draw: int) -> Tensor:
    """Return the noise added to each position in training: (N, d)."""
    place_N = torch.arange(num_positions, device=predictor.mask_token.device)
    keys_N = draws.sample_keys(seed, draw, place_N, 0, "stop_similarity")
    return predictor.noise(draws.normal(keys_N, predictor.noise_width))


def similarity(queries_ND: Tensor, position_ND: Tensor) -> Tensor:
    """Return the cosine of each query (row) and position (column)."""
    return F.normalize(queries_ND, dim=-1) @ F.normalize(position_ND, dim=-1).T


def _draw(
    fixed_NN: Tensor,
    similarity_SNN: Tensor,
    queries: Sequence[int],
    grid: tuple[int, int],
    folder: Path | None,
) -> list[str]:
    """Write the picture if there is a folder; return its name."""
    if folder is None:
        return []
    kinds = {
        "without noise": fixed_NN,
        "one draw": similarity_SNN[0],
        f"mean of {len(similarity_SNN)}": similarity_SNN.mean(0),
    }
    limits = (float(fixed_NN.min()), 1.0)
    rows = [
        [
            Cell(grid, as_map(map_NN[query], grid), title=kind, marks=[query], limits=limits)
            for kind, map_NN in kinds.items()
        ]
        for query in queries
    ]
    title = "similarity of a position to all"
    figure = draw_cells(rows, [f"position {query}" for query in queries], title=title)
    return [save_figure(figure, folder, "stop_similarity.png")]
