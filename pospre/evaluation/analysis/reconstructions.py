"""Reconstructions of hidden patches by a model that predicts pixels, such as MAE.

Random patches of each image are hidden (for SimMIM too, not cells); centre view, no flip. The error
is the mean square over their pixels in the units of the loss. With MAE's ``norm_pix`` these are
normalised per patch, so predicting the patch's mean gives an error of 1. Pictures restore the
patch's own mean and deviation, as published ones do (He et al. 2022, Fig. 2).
"""

from typing import Any

import torch
from torch import Tensor

from pospre.batch import HIDDEN, MASKED, Batch
from pospre.errors import UserError
from pospre.evaluation.analysis.settings import Reconstructions
from pospre.evaluation.drawing import Cell, as_picture, save_groups
from pospre.evaluation.estimates import compared, mean_and_error
from pospre.evaluation.features import centre_batches
from pospre.evaluation.isolated_method import IsolatedMethod
from pospre.evaluation.registry import UNTRAINED, Context
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs, PixelObjective
from pospre.nn.encoder_interface import patchify, unpatchify
from pospre.nn.masking import PatchMasking, gather_tokens, scatter_tokens, slot_mask

NEEDS = PixelObjective
FIGURES = {"error": "min"}
IN_A_ROW = 2  # images


def evaluate(context: Context, settings: Reconstructions) -> dict[str, Any]:
    """Measure the error, and draw original, visible patches and reconstruction.

    Returns:
        Means over images with standard errors (``…_se``): ``error``; ``flat_error``, the error of
        predicting 0 (the patch's own mean, or the mean colour of the data); ``initial_error`` of
        the untrained model, without standard error; and the ``error_difference`` to it.
    """
    host, initial = alone(context.model), alone(context.initial()) if settings.baseline else None
    batches = centre_batches(context, settings)
    parts: list[Tensor] = []
    cells: list[list[Cell]] = []
    for batch in batches:
        batch = hide(host, batch, settings.mask_ratio, settings.seed)
        outputs = host.outputs(batch)
        untrained = outputs if initial is None else initial.outputs(batch)
        parts.append(torch.stack([*_errors(outputs), _errors(untrained)[0]], dim=1).cpu())
        for row in range(min(len(batch["index"]), settings.num_pictures - len(cells))):
            cells.append(_cells(host.model, batch, outputs, row))
    error, flat, untrained_error = torch.cat(parts).unbind(1)
    errors = {"": error, **({} if initial is None else {UNTRAINED: untrained_error})}
    return {
        **compared("error", errors),
        **mean_and_error("error", error),
        **mean_and_error("flat_error", flat),
        "samples": len(error),
        "pictures": save_groups(cells, IN_A_ROW, context.folder, "reconstructions.png"),
    }


def alone(model: PretrainModel) -> IsolatedMethod:
    """Return the method that predicts pixels, in isolation: others may edit its pass."""
    host = IsolatedMethod(model, PixelObjective, seed=0, second_mask_ratio=0.0)
    if others := host.groups - {"view"}:
        raise UserError(
            f"it hides patches of the view group 'view', but algorithms.{host.name} reads "
            f"{', '.join(sorted(others))}."
        )
    return host


def hide(host: IsolatedMethod, batch: Batch, mask_ratio: float, seed: int) -> Batch:
    """Return a batch in which random patches are hidden from the method."""
    encoder = host.model.encoder
    masks = PatchMasking.by_ratio("reconstructions", encoder.grid, mask_ratio).draw(batch, seed)
    masked = slot_mask(masks[HIDDEN], encoder.num_patches)
    return {**host.draw(batch), **masks, MASKED: masked}


def _errors(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Return the squared error of each image (B,), and the error of predicting 0."""
    target = outputs["target"].double()
    wrong = outputs["predicted"].double() - target
    return wrong.square().mean((1, 2)), target.square().mean((1, 2))


def painted(model: PretrainModel, batch: Batch, outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Return uint8 (B, 3, H, W): the images with hidden patches blank, and with predictions."""
    encoder, removed = model.encoder, batch["view/hidden"]
    patches = patchify(model.images(batch)[:, 0], encoder.patch_size)
    objective = model.objectives.of(NEEDS)
    predicted = objective.painted(outputs, gather_tokens(patches, removed))
    gray = patches.new_zeros(predicted.shape)
    visible, whole = (
        unpatchify(scatter_tokens(patches, removed, part), encoder.grid)
        for part in (gray, predicted)
    )
    augment = model.augment
    levels = (255 * (part * augment.std + augment.mean) for part in (visible, whole))
    first, second = (part.round().clamp(0, 255).to(torch.uint8) for part in levels)
    return first, second


def _cells(model: PretrainModel, batch: Batch, outputs: Outputs, row: int) -> list[Cell]:
    """Return the three pictures of an image."""
    one = {key: value[row : row + 1] for key, value in batch.items()}
    visible, whole = painted(
        model, one, {key: value[row : row + 1] for key, value in outputs.items()}
    )
    titles = ("original", "what it sees", "what it paints")
    views = (batch["view/image"][row, 0], visible[0], whole[0])
    return [
        Cell(model.encoder.grid, image=as_picture(view), title=title)
        for view, title in zip(views, titles, strict=True)
    ]
