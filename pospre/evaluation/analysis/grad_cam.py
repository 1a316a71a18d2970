"""Grad-CAM: the patches that a class head relies on (Selvaraju et al. 2017; LUT, Fig. 3).

A are the tokens after the first norm of a block, by default the last. The gradient of a class's
logit, averaged over patches, weights A's channels. The map is the positive part of the weighted
sum. Pictures: the maps over their images.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pospre.algorithms.supervised.supervised import Classification
from pospre.batch import LABEL, Batch
from pospre.evaluation.analysis.settings import GradCam
from pospre.evaluation.classification.accuracy import class_head
from pospre.evaluation.classification.class_sets import HeadClasses, head_names, match_classes
from pospre.evaluation.drawing import Cell, as_map, as_picture, save_groups
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.features import centre_batches
from pospre.evaluation.layers import planned_encoder
from pospre.evaluation.registry import Context, Plan
from pospre.model.model import PretrainModel

NEEDS = Classification
FIGURES = {"area": "max"}
IN_A_ROW = 4  # pictures


def evaluate(context: Context, settings: GradCam) -> dict[str, Any]:
    """Draw the maps, and measure the area they cover.

    Returns:
        ``area``: share of an image's patches with at least half its maximum, mean over images with
        standard error ``area_se``; ``empty``: share of images without a positive value, which
        ``area`` leaves out.
    """
    layer = settings.layer or context.model.encoder.depth
    classes: HeadClasses = context.opened
    batches = centre_batches(context, settings)
    areas: list[Tensor] = []
    cells: list[tuple[Cell, Cell]] = []
    for batch in batches:
        label_B = None
        if settings.target == "label":
            label_B = classes.numbers(batch[LABEL], context.data)
        images = context.model.images(batch)[:, 0]
        maps_BN, asked_B = class_maps(context.model, images, layer, label_B)
        areas.append(covered(maps_BN).cpu())
        for row in range(min(len(maps_BN), settings.num_pictures - len(cells))):
            asked = int(asked_B[row])
            cells.append(_cells(context, batch, row, maps_BN[row], classes.names[asked]))
    area_M = torch.cat(areas)
    is_mapped = area_M > 0
    none: dict[str, Any] = {"area": None, "area_se": None}
    return {
        **(mean_and_error("area", area_M[is_mapped]) if is_mapped.any() else none),
        "empty": float((~is_mapped).double().mean()),
        "layer": layer,
        "samples": len(area_M),
        "pictures": save_groups(cells, IN_A_ROW, context.folder, "grad_cam.png", "Grad-CAM"),
    }


def check(plan: Plan[GradCam]) -> HeadClasses:
    """Return the classes; raise a ``UserError`` for invalid layers, or missing labels."""
    layer = plan.settings.layer
    planned_encoder(plan.recipe, None if layer is None else [layer])
    if plan.settings.target == "label":
        return match_classes(plan)
    return HeadClasses(head_names(plan.recipe), None)


def class_maps(
    model: PretrainModel, images_BCHW: Tensor, layer: int, class_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the maps (B, N), not negative, and their classes (B,); None: the predicted ones.

    ``layer`` is the block, counted from 1.
    """
    head = class_head(model)
    kept: dict[str, Tensor] = {}

    def hold(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        kept["tokens"] = output.detach().requires_grad_()
        torch.set_grad_enabled(True)  # from here on: earlier blocks store nothing
        return kept["tokens"]

    block: Any = model.vit.blocks[layer - 1]
    hook = block.norm1.register_forward_hook(hold)
    with hook, torch.no_grad():
        logits_BC = head({"student": model.encoder(images_BCHW)}, {})["logits"]
        asked_B = logits_BC.argmax(-1) if class_B is None else class_B
        asked = logits_BC.gather(1, asked_B[:, None]).sum()
        (gradient_BTD,) = torch.autograd.grad(asked, kept["tokens"])
    patches = slice(model.encoder.num_prefix_tokens, None)
    weight_B1D = gradient_BTD[:, patches].mean(1, keepdim=True)
    maps_BN = (kept["tokens"].detach()[:, patches] * weight_B1D).sum(-1).clamp_min(0)
    return maps_BN, asked_B


def covered(maps_BN: Tensor) -> Tensor:
    """Return the share (B,) of patches with at least half the maximum; 0 for empty maps."""
    top_B1 = maps_BN.amax(1, keepdim=True)
    return ((maps_BN >= top_B1 / 2) & (top_B1 > 0)).double().mean(1)


def _cells(context: Context, batch: Batch, row: int, map_N: Tensor, name: str) -> tuple[Cell, Cell]:
    grid = context.model.encoder.grid
    view = as_picture(batch["view/image"][row, 0])
    heat = as_map(map_N / map_N.max().clamp_min(1e-12), grid)
    limits = (0.0, 1.0)
    return Cell(grid, image=view), Cell(
        grid, heat, view, name[:20], limits=limits, colours="inferno"
    )
