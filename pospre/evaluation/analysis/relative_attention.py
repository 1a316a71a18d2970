"""Attention as a function of the offset from query to key (MP3, Zhai et al. 2022, Fig. 8 and 11).

For every head, this is the mean attention over images and all pairs of patches with one offset
(Δrow, Δcolumn). Prefix tokens are removed, and rows renormalised. Heads are sorted by the entropy
of their attention, averaged over queries, lowest first. All tokens give keys, even if the model was
trained with a context.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pospre.evaluation.analysis.settings import RelativeAttention
from pospre.evaluation.drawing import Cell, draw_cells, save_arrays, save_figure
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.features import centre_batches
from pospre.evaluation.layers import (
    attention_entropy,
    check_attention,
    chosen_layers,
    patch_attention,
)
from pospre.evaluation.registry import Context, Plan
from pospre.nn.grid import grid_offsets
from pospre.nn.sizes import pair

FIGURES = {"near": "max"}


def evaluate(context: Context, settings: RelativeAttention) -> dict[str, Any]:
    """Average attention by offset.

    Returns:
        ``layers``: per layer ``heads``, sorted: ``head`` (from 0), ``entropy`` in nats, ``own``
        (attention of a patch to itself), ``near`` (to the 3 × 3 around it) and ``peak``, the offset
        with the largest mean attention; ``near``: the mean over heads; with standard errors over
        images (``…_se``). The maps are in ``maps``, an archive beside the picture.
    """
    model = context.model
    chosen = chosen_layers(settings.layers, model.encoder.depth, first=1)
    size = pair(settings.image_size or context.image_size)
    batches = centre_batches(context, settings, size=size)
    grid = model.encoder.grid_of(*size)
    sums: dict[int, Tensor] = {}
    parts: dict[int, list[Tensor]] = {layer: [] for layer in chosen}
    for batch in batches:
        for layer, maps_BHNN in patch_attention(model, model.images(batch)[:, 0], chosen):
            offsets = by_offset(maps_BHNN.double().sum(0), grid)
            sums[layer] = offsets + sums.get(layer, 0)
            own, near = near_attention(maps_BHNN, grid)
            figures = torch.stack([attention_entropy(maps_BHNN), own, near], dim=1)
            parts[layer].append(figures.cpu())  # b, 3, heads
    whole = {layer: torch.cat(figures) for layer, figures in parts.items()}
    samples = len(whole[chosen[0]])
    maps = {layer: (total / samples).cpu() for layer, total in sums.items()}
    results = {
        "layers": [
            {"layer": layer, "heads": _heads(whole[layer], maps[layer], grid)} for layer in chosen
        ],
        **mean_and_error(
            "near", torch.stack([whole[layer][:, 2] for layer in chosen]).mean((0, 2))
        ),
        "uniform": _uniform(grid),
        "grid": list(grid),
        "samples": samples,
    }
    return results | _draw(results, maps, settings.num_heads, context.folder)


def check(plan: Plan[RelativeAttention]) -> None:
    """Raise a ``UserError`` for invalid layers or sizes."""
    check_attention(plan)


def by_offset(maps_HNN: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the mean over the pairs of every offset: (heads, 2·rows − 1, 2·columns − 1).

    The offset (Δrow, Δcolumn) of a key from its query is at (rows − 1 + Δrow, columns − 1 +
    Δcolumn).
    """
    rows, columns = grid
    offset_NN2 = grid_offsets(*grid).to(maps_HNN.device)
    high, wide = 2 * rows - 1, 2 * columns - 1
    offset = (offset_NN2[..., 0] + rows - 1) * wide + offset_NN2[..., 1] + columns - 1
    sums = maps_HNN.new_zeros(len(maps_HNN), high * wide)
    sums.index_add_(1, offset.flatten(), maps_HNN.flatten(1))
    pairs = torch.bincount(offset.flatten(), minlength=high * wide)
    return (sums / pairs).unflatten(1, (high, wide))


def near_attention(maps_BHNN: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return attention to the patch itself and its 3 × 3 area, mean over queries: (B, heads)."""
    reach_NN = grid_offsets(*grid).to(maps_BHNN.device).abs().amax(-1)
    own, near = ((maps_BHNN * (reach_NN <= reach)).sum(-1).mean(-1) for reach in (0, 1))
    return own, near


def _uniform(grid: tuple[int, int]) -> dict[str, float]:
    """Return the values of uniform attention."""
    patches = grid[0] * grid[1]
    own, near = near_attention(torch.full((1, 1, patches, patches), 1 / patches), grid)
    return {"own": float(own), "near": float(near)}


def _heads(figures_M3H: Tensor, map_HRC: Tensor, grid: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the results for the heads of a layer, lowest entropy first."""
    heads = []
    for head in figures_M3H[:, 0].mean(0).argsort().tolist():
        row, column = divmod(int(map_HRC[head].argmax()), map_HRC.shape[2])
        values = {"head": head, "peak": [row - grid[0] + 1, column - grid[1] + 1]}
        for number, name in enumerate(("entropy", "own", "near")):
            values |= mean_and_error(name, figures_M3H[:, number, head])
        heads.append(values)
    return heads


def _draw(
    results: Mapping[str, Any],
    maps: Mapping[int, Tensor],
    num_heads: int | None,
    folder: Path | None,
) -> dict[str, Any]:
    """Write the picture and the maps if there is a folder; return their names."""
    if folder is None:
        return {"pictures": [], "maps": None}
    shape = tuple(maps[results["layers"][0]["layer"]].shape[1:])
    cells = [
        [
            Cell(
                (shape[0], shape[1]),
                maps[row["layer"]][head["head"]].numpy(),
                title=f"head {head['head']}  H={head['entropy']:.2f}",
            )
            for head in row["heads"][:num_heads]
        ]
        for row in results["layers"]
    ]
    labels = [f"layer {row['layer']}" for row in results["layers"]]
    title = "attention by offset of the key (middle: oneself), heads by entropy"
    figure = draw_cells(cells, labels, title=title, side=1.1)
    arrays = {f"layer_{layer}": map_HRC for layer, map_HRC in maps.items()}
    return {
        "pictures": [save_figure(figure, folder, "relative_attention.png")],
        "maps": save_arrays(arrays, folder, "maps.npz"),
    }
