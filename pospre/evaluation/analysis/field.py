"""Pictures of the position table: the crop field's, or any ViT's (Intertwined, Sec. 3.2).

They show the norms of the vectors, their similarity to those of chosen places, and their first
three principal components as colours. With ``crop_field`` the table is the learned field at its own
resolution; otherwise the encoder's (learned or sin-cos). No images are used.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.analysis.settings import Field
from pospre.evaluation.drawing import Cell, as_map, draw_cells, save_figure
from pospre.evaluation.layers import planned_encoder, three_patches
from pospre.evaluation.registry import Context, Plan
from pospre.model.model import PretrainModel
from pospre.nn.positions import schemes_that

FIGURES = {"neighbours": "max"}
COLOURS = 3  # principal components that are drawn


def evaluate(context: Context, settings: Field) -> dict[str, Any]:
    """Measure and draw the table.

    Returns:
        ``norm`` (mean, smallest and largest norm of a vector), ``neighbours`` (mean cosine of
        horizontally or vertically adjacent vectors), ``all`` (of all pairs), ``explained``
        (variance shares of the first principal components) and ``grid``.
    """
    table_RCD = position_vectors(context.model).double()
    rows, columns = table_RCD.shape[:2]
    vectors_ND = table_RCD.flatten(0, 1)
    norm_N = vectors_ND.norm(dim=-1)
    explained, colours_N3 = principal_colours(vectors_ND)
    results = {
        "norm": [float(norm_N.mean()), float(norm_N.min()), float(norm_N.max())],
        "neighbours": neighbour_cosine(table_RCD),
        "all": all_pairs_cosine(vectors_ND),
        "explained": explained,
        "grid": [rows, columns],
        "width": vectors_ND.shape[1],
        "source": context.model.layout.placer or context.model.encoder.positions.name,
    }
    return {**results, "pictures": _draw(vectors_ND, colours_N3, (rows, columns), context.folder)}


def check(plan: Plan[Field]) -> None:
    """Raise a ``UserError`` for an encoder without a table of positions."""
    positions = planned_encoder(plan.recipe).positions
    if positions.vectors() is None:
        raise UserError(
            f"it draws a table of positions, but encoder.positions is {positions.name}; it "
            f"supports {schemes_that('inputs')}."
        )


def position_vectors(model: PretrainModel) -> Tensor:
    """Return the vectors (rows, columns, D) of the learned field, or of the encoder's table."""
    table = model.encoder.positions.vectors()
    assert table is not None
    return table.detach()


def neighbour_cosine(table_RCD: Tensor) -> float | None:
    """Return the mean cosine of horizontally or vertically adjacent vectors."""
    below = F.cosine_similarity(table_RCD[1:], table_RCD[:-1], dim=-1)
    beside = F.cosine_similarity(table_RCD[:, 1:], table_RCD[:, :-1], dim=-1)
    pairs = torch.cat([below.flatten(), beside.flatten()])
    return float(pairs.mean()) if len(pairs) else None


def all_pairs_cosine(vectors_ND: Tensor) -> float | None:
    """Return the mean cosine of all pairs of different vectors."""
    count = len(vectors_ND)
    unit_ND = F.normalize(vectors_ND, dim=-1)
    pairs = unit_ND.sum(0).square().sum() - unit_ND.square().sum()
    return float(pairs / (count * (count - 1))) if count > 1 else None


def principal_colours(vectors_ND: Tensor) -> tuple[list[float], Tensor]:
    """Return the variance shares of the first three components, and these in [0, 1]: (N, 3).

    A component's sign is arbitrary; its largest entry is made positive.
    """
    centred_ND = vectors_ND - vectors_ND.mean(0)
    left_NK, values_K, _ = torch.linalg.svd(centred_ND, full_matrices=False)
    scores = F.pad(left_NK[:, :COLOURS], (0, max(0, COLOURS - left_NK.shape[1])))
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    scores = scores * torch.where(largest < 0, -1.0, 1.0)
    low, high = scores.amin(0), scores.amax(0)
    shares = values_K.square() / values_K.square().sum().clamp_min(1e-300)
    return shares[:COLOURS].tolist(), (scores - low) / (high - low).clamp_min(1e-12)


def _draw(
    vectors_ND: Tensor, colours_N3: Tensor, grid: tuple[int, int], folder: Path | None
) -> list[str]:
    """Write the picture if there is a folder; return its name."""
    if folder is None:
        return []
    unit_ND = F.normalize(vectors_ND, dim=-1)
    norms = as_map(vectors_ND.norm(dim=-1), grid)
    cells = [
        Cell(grid, norms, title=f"norms, {norms.min():.3g} to {norms.max():.3g}"),
        Cell(grid, as_map(colours_N3, grid), title="three components"),
    ]
    for patch in three_patches(grid):
        similar = as_map(unit_ND @ unit_ND[patch], grid)
        title = f"cosine to {patch}, {similar.min():.2f} to 1"
        cells.append(Cell(grid, similar, title=title, marks=[patch]))
    figure = draw_cells([cells], title="table of positions", side=2.2)
    return [save_figure(figure, folder, "field.png")]
