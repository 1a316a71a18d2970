"""Effective rank and length of features, layer by layer.

From one feature vector per image (or from all patches) it computes the singular values of the
covariance (LUT, Fig. 4b); RankMe, exp of the entropy of the normalised singular values of the
uncentred features (Garrido et al. 2023); and the effective rank, the same for centred features (Roy
and Vetterli 2007). From the patch tokens before the final norm it computes their length, and
artefacts: tokens several times longer than their image's median (Darcet et al. 2024), with maps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from torch import Tensor

from pospre.evaluation.analysis.settings import Source, Spectrum
from pospre.evaluation.drawing import (
    Cell,
    as_map,
    as_picture,
    draw_depth,
    new_figure,
    save_figure,
    save_groups,
)
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.features import centre_batches, check_images, check_pooling
from pospre.evaluation.layers import (
    chosen_layers,
    layer_tokens,
    planned_encoder,
)
from pospre.evaluation.registry import Context, Plan

FIGURES = {"rankme": "max", "artefacts": "min"}
IN_A_ROW = 2  # pictures
LENGTHS = ("length", "longest", "artefacts")


@dataclass
class Gathered:
    """Count, sum and sum of outer products of a layer's features, and its ``token_lengths``."""

    count: int = 0
    total_D: Tensor | float = 0.0
    products_DD: Tensor | float = 0.0
    lengths: list[Tensor] = field(default_factory=list)

    def add(self, features_MD: Tensor) -> None:
        """Add feature vectors."""
        features_MD = features_MD.double()
        self.count += len(features_MD)
        self.total_D = self.total_D + features_MD.sum(0)
        self.products_DD = self.products_DD + features_MD.T @ features_MD


def evaluate(context: Context, settings: Spectrum) -> dict[str, Any]:
    """Measure spectra and lengths.

    Returns:
        ``layers``: per layer ``singular_values`` of the covariance, ``rankme`` and
        ``effective_rank``; as means over images with standard errors (``…_se``), ``length`` and
        ``longest`` (of an image's tokens) and ``artefacts`` (share of the tokens). ``rankme`` and
        ``artefacts`` are those of the last layer.
    """
    model = context.model
    chosen = chosen_layers(settings.layers, model.encoder.depth)
    batches = centre_batches(context, settings)
    gathered = {layer: Gathered() for layer in chosen}
    cells: list[list[Cell]] = []
    for batch in batches:
        tokens = layer_tokens(model, model.images(batch)[:, 0], chosen, norm=False)
        for layer, tokens_BTD in zip(chosen, tokens, strict=True):
            patches_BND = tokens_BTD[:, model.encoder.num_prefix_tokens :]
            lengths_BN = patches_BND.double().norm(dim=-1)
            gathered[layer].lengths.append(token_lengths(lengths_BN, settings.artefact).cpu())
            with torch.no_grad():
                normed_BTD = model.vit.norm(tokens_BTD) if settings.norm else tokens_BTD
            gathered[layer].add(
                _vectors(normed_BTD, model.encoder.num_prefix_tokens, settings.features)
            )
        for row in range(min(len(batch["index"]), settings.num_pictures - len(cells))):
            view = as_picture(batch["view/image"][row, 0])
            cells.append(_cells(view, lengths_BN[row], model.encoder.grid, settings.artefact))
    rows = [{"layer": layer, **summarise(each)} for layer, each in gathered.items()]
    last = gathered[chosen[-1]]
    results = {
        "layers": rows,
        **{key: rows[-1][key] for key in ("rankme", "artefacts", "artefacts_se")},
        "vectors": last.count,
        "samples": sum(map(len, last.lengths)),
    }
    return {**results, "pictures": _draw(rows, cells, context.folder)}


def check(plan: Plan[Spectrum]) -> None:
    """Raise a ``UserError`` for invalid layers, a missing class token, or a single image."""
    planned_encoder(plan.recipe, plan.settings.layers)
    check_pooling(plan)
    check_images(plan, 2)


def _vectors(tokens_BTD: Tensor, num_prefix: int, features: Source) -> Tensor:
    if features == "cls":
        return tokens_BTD[:, 0]
    patches_BND = tokens_BTD[:, num_prefix:]
    return patches_BND.mean(1) if features == "mean" else patches_BND.flatten(0, 1)


def token_lengths(lengths_BN: Tensor, artefact: float) -> Tensor:
    """Return (B, 3): mean and maximal length of an image's tokens, and the share of artefacts."""
    median_B1 = lengths_BN.quantile(0.5, dim=1, keepdim=True)
    share_B = (lengths_BN > artefact * median_B1).double().mean(1)
    return torch.stack([lengths_BN.mean(1), lengths_BN.amax(1), share_B], dim=1)


def summarise(layer: Gathered) -> dict[str, Any]:
    """Return the results of a layer, as in ``evaluate``."""
    mean_D = torch.as_tensor(layer.total_D) / layer.count
    square_DD = torch.as_tensor(layer.products_DD) / layer.count
    covariance_DD = (square_DD - torch.outer(mean_D, mean_D)) * layer.count / (layer.count - 1)
    rounding = 1e-13 * float(square_DD.trace())
    spectrum_D = eigenvalues(covariance_DD, rounding)
    results: dict[str, Any] = {
        "rankme": rank_of(eigenvalues(square_DD, rounding).sqrt()),
        "effective_rank": rank_of(spectrum_D.sqrt()),
        "singular_values": [float(f"{value:.6g}") for value in spectrum_D.tolist()],
    }
    lengths = torch.cat(layer.lengths)
    for name, values in zip(LENGTHS, lengths.unbind(1), strict=True):
        results |= mean_and_error(name, values)
    return results


def eigenvalues(products_DD: Tensor, rounding: float) -> Tensor:
    """Return a symmetric matrix's eigenvalues, descending; values below ``rounding`` become 0."""
    values_D = torch.linalg.eigvalsh(products_DD).flip(0)
    return values_D.masked_fill(values_D < rounding, 0.0)


def rank_of(singular_values: Tensor) -> float:
    """Return exp of the entropy of the normalised singular values; 0 if all are 0."""
    total = singular_values.sum()
    if not total:
        return 0.0
    return float(torch.special.entr(singular_values / total).sum().exp())


def _cells(
    view: np.ndarray, lengths_N: Tensor, grid: tuple[int, int], artefact: float
) -> list[Cell]:
    """Return an image, and its token lengths with artefacts marked."""
    median = float(lengths_N.quantile(0.5))
    artefacts = (lengths_N > artefact * median).nonzero().flatten().tolist()
    title = f"median {median:.3g}, longest {lengths_N.max():.3g}"
    return [
        Cell(grid, image=view),
        Cell(grid, as_map(lengths_N, grid), title=title, marks=artefacts),
    ]


def _draw(
    rows: Sequence[Mapping[str, Any]], cells: list[list[Cell]], folder: Path | None
) -> list[str]:
    """Write the pictures if there is a folder; return their names."""
    if folder is None:
        return []
    figure = new_figure(12, 3.4)
    spectra, ranks, lengths = figure.subplots(1, 3)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(rows)))
    numbers = [row["layer"] for row in rows]
    for row, shade in zip(rows, shades, strict=True):
        values = np.array([value for value in row["singular_values"] if value])
        label = f"layer {row['layer']}" if row["layer"] in numbers[:: len(rows) - 1 or 1] else None
        spectra.plot(np.arange(1, len(values) + 1), values, color=shade, label=label)
    spectra.set(xlabel="rank", ylabel="singular value of the covariance", yscale="log")
    spectra.legend(fontsize=8)
    for name in ("rankme", "effective_rank"):
        ranks.plot(numbers, [row[name] for row in rows], "o-", markersize=3)
    ranks.legend(["RankMe", "effective rank"], fontsize=8)
    ranks.set(xlabel="layer", ylabel="directions in use")
    for name in ("length", "longest"):
        draw_depth(lengths, rows, name, "length of patch tokens")
    lengths.legend(["mean", "longest of an image"], fontsize=8)
    title = f"lengths of patch tokens, layer {numbers[-1]}; points: artefacts"
    return [
        save_figure(figure, folder, "spectrum.png"),
        *save_groups(cells, IN_A_ROW, folder, "lengths.png", title),
    ]
