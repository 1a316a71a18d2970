"""Attention statistics: distance, entropy, mutual information and maps of single queries.

All are per layer and head, averaged over queries and images, among patches only (prefix tokens are
removed, and rows renormalised):

- mean attention distance in pixels, Σ_k π(k|q)·‖p_q − p_k‖ (Dosovitskiy et al. 2021; LUT's AAD,
  eq. 4, divides it by the image's side);
- entropy of π(·|q) in nats;
- normalised mutual information of query and key, I(q, k) / √(H(q)·H(k)) with p(q) = 1/N (Park et
  al. 2023; Intertwined, Fig. 5): 0 if all queries attend alike, 1 if each attends to its own keys;
- lines: the share of a map's variance between its columns, and between its rows, averaged over
  heads. A larger share between columns means vertical lines (Intertwined, Fig. 7).

Pictures: these statistics over the layers, and the last layer's maps of chosen queries (LUT, Fig.
1; Intertwined, Fig. 6). ``queries.npz`` beside them holds ``images`` (M, 3, H, W), from 0 to 255,
and ``maps`` (M, heads, queries, rows, columns), each of sum 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pospre.batch import Batch
from pospre.evaluation.analysis.settings import Attention
from pospre.evaluation.drawing import (
    Cell,
    as_map,
    as_picture,
    draw_depth,
    new_figure,
    save_arrays,
    save_figure,
    save_groups,
)
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.features import centre_batches
from pospre.evaluation.layers import (
    attention_entropy,
    check_attention,
    check_queries,
    chosen_layers,
    patch_attention,
    three_patches,
)
from pospre.evaluation.registry import Context, Plan
from pospre.nn.grid import grid_offsets
from pospre.nn.sizes import pair

FIGURES = {"distance": "max", "nmi": "max"}
PER_HEAD = {"distance": "distance in px", "nmi": "NMI", "entropy": "entropy in nats"}
LINES = ("columns", "rows")


def evaluate(context: Context, settings: Attention) -> dict[str, Any]:
    """Measure attention.

    Returns:
        ``layers``: per layer the means over heads and images with standard errors (``…_se``), and
        ``heads`` with the values of each head; ``distance``, ``nmi`` and ``entropy``: the means
        over layers; ``uniform``: the values of uniform attention.
    """
    chosen = chosen_layers(settings.layers, context.model.encoder.depth, first=1)
    size = pair(settings.image_size or context.image_size)
    batches = centre_batches(context, settings, size=size)
    grid = context.model.encoder.grid_of(*size)
    asked = list(settings.queries or three_patches(grid))
    figures, cells, arrays = _measure(context, batches, chosen, asked, settings.num_pictures)
    results = _summarise(figures, chosen)
    pixels_NN = pixel_distances(grid, context.model.encoder.patch_size)
    results["uniform"] = {
        "distance": float(pixels_NN.mean()),
        "entropy": float(torch.tensor(len(pixels_NN)).double().log()),
        "nmi": 0.0,
    }
    results |= {"image_size": list(size), "grid": list(grid), "queries": asked}
    results["pictures"] = _draw(results, cells, context.folder)
    if context.folder is not None and arrays:
        maps = {name: torch.stack([each[name] for each in arrays]) for name in arrays[0]}
        results["arrays"] = save_arrays(maps, context.folder, "queries.npz")
    return results


def check(plan: Plan[Attention]) -> None:
    """Raise a ``UserError`` for invalid layers, queries or sizes."""
    grid = check_attention(plan)
    check_queries(plan.settings.queries or (), grid)


def _measure(
    context: Context,
    batches: Iterable[Batch],
    layers: Sequence[int],
    queries: Sequence[int],
    num_pictures: int,
) -> tuple[dict[str, list[Tensor]], list[list[Cell]], list[dict[str, Tensor]]]:
    """Return the statistics of every image, (M, layers, heads) or (M, layers), and query maps.

    The maps are pictures, and arrays: ``images`` (3, H, W), ``maps`` (heads, queries, rows, cols).
    """
    encoder = context.model.encoder
    parts: dict[str, dict[int, list[Tensor]]] = {}
    drawn: list[list[Cell]] = []
    arrays: list[dict[str, Tensor]] = []
    for batch in batches:
        images = context.model.images(batch)[:, 0]
        grid = encoder.grid_of(*images.shape[-2:])
        pixels_NN = pixel_distances(grid, encoder.patch_size).to(images.device)
        done = 0
        for layer, maps_BHNN in patch_attention(context.model, images, layers):
            figures = head_figures(maps_BHNN, pixels_NN) | line_shares(maps_BHNN.mean(1), grid)
            for name, values in figures.items():
                parts.setdefault(name, {}).setdefault(layer, []).append(values.cpu())
            if layer == layers[-1]:
                for number in range(min(len(maps_BHNN), num_pictures - len(drawn))):
                    image = batch["view/image"][done + number, 0]
                    maps = maps_BHNN[number][:, queries].unflatten(-1, grid)
                    arrays.append({"images": image.cpu(), "maps": maps.cpu()})
                    view = as_picture(image)
                    drawn.append(_cells(view, maps_BHNN[number].mean(0), queries, grid))
                done += len(maps_BHNN)
    by_layer = {name: [torch.cat(each[layer]) for layer in layers] for name, each in parts.items()}
    return by_layer, drawn, arrays


def pixel_distances(grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Return float32 (N, N) distances in pixels between the centres of patches."""
    return (grid_offsets(*grid) * torch.tensor(patch)).float().norm(dim=-1)


def head_figures(maps_BHNN: Tensor, distance_NN: Tensor) -> dict[str, Tensor]:
    """Return ``distance``, ``nmi`` and ``entropy`` (B, heads) of attention whose rows sum to 1."""
    num_patches = maps_BHNN.shape[-1]
    entropy_BH = attention_entropy(maps_BHNN)
    of_keys_BH = torch.special.entr(maps_BHNN.mean(-2)).sum(-1)
    # I = H(k) − H(k|q); if all queries attend to the same single patch it is 0, like H(k)
    information_BH = (of_keys_BH - entropy_BH).clamp_min(0)
    both = (torch.tensor(num_patches).log() * of_keys_BH).sqrt().clamp_min(1e-6)
    return {
        "distance": (maps_BHNN * distance_NN).sum(-1).mean(-1),
        "nmi": information_BH / both,
        "entropy": entropy_BH,
    }


def line_shares(maps_BNN: Tensor, grid: tuple[int, int]) -> dict[str, Tensor]:
    """Return the shares (B,) of a map's variance between its ``columns`` and between its ``rows``.

    Each query's row is a map over the grid. The shares are averaged over queries; those of maps
    without variance are 0.
    """
    picture = maps_BNN.double().unflatten(-1, grid)
    total = picture.var((-2, -1), correction=0)
    flat = total <= 1e-24
    shares = {
        "columns": picture.mean(-2).var(-1, correction=0),
        "rows": picture.mean(-1).var(-1, correction=0),
    }
    return {
        name: (value / total.clamp_min(1e-24)).masked_fill(flat, 0.0).mean(-1)
        for name, value in shares.items()
    }


def _summarise(figures: Mapping[str, list[Tensor]], chosen: Sequence[int]) -> dict[str, Any]:
    results: dict[str, Any] = {"layers": []}
    for index, layer in enumerate(chosen):
        row: dict[str, Any] = {"layer": layer, "heads": {}}
        for name, values in figures.items():
            if name in PER_HEAD:
                row["heads"] |= mean_and_error(name, values[index])
            row |= mean_and_error(name, values[index].unflatten(0, (-1, 1)).flatten(1).mean(1))
        results["layers"].append(row)
    for name in PER_HEAD:
        results |= mean_and_error(name, torch.stack(figures[name]).mean((0, 2)))
    return results | {"samples": len(figures["nmi"][0])}


def _cells(view: Any, map_NN: Tensor, queries: Sequence[int], grid: tuple[int, int]) -> list[Cell]:
    """Return the image with its queries marked, and each query's map over it."""
    points = [f"C{number}" for number in range(len(queries))]
    maps = [
        Cell(
            grid,
            as_map(map_NN[query], grid),
            view,
            f"patch {query}",
            [query],
            [point],
            colours="inferno",
        )
        for query, point in zip(queries, points, strict=True)
    ]
    return [Cell(grid, image=view, marks=queries, mark_colours=points), *maps]


def _draw(results: Mapping[str, Any], cells: list[list[Cell]], folder: Path | None) -> list[str]:
    """Write the pictures if there is a folder; return their names."""
    if folder is None:
        return []
    rows = results["layers"]
    figure = new_figure(12, 3.2)
    *axes, last = figure.subplots(1, len(PER_HEAD) + 1)
    for axis, (name, label) in zip(axes, PER_HEAD.items(), strict=True):
        draw_depth(axis, rows, name, label, heads=True)
        axis.axhline(results["uniform"][name], color="0.6", linestyle=":")
    for name in LINES:
        draw_depth(last, rows, name, "share of variance")
    figure.suptitle("dots: heads; bars: two standard errors; dotted: uniform attention", fontsize=9)
    last.legend(["between columns", "between rows"], fontsize=8)
    title = f"attention of chosen patches, layer {rows[-1]['layer']}, mean of heads"
    return [
        save_figure(figure, folder, "attention.png"),
        *save_groups(cells, 1, folder, "queries.png", title),
    ]
