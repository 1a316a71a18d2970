"""What DropPos and MP3 predict at any mask ratio: what the evaluations of positions are made of."""

from functools import partial

import torch
from torch import Tensor

from pospre.algorithms.droppos import PositionClassification, draw_masks
from pospre.algorithms.mp3 import draw_patches, draw_shown, num_context
from pospre.batch import Batch
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass
from pospre.nn.masking import slot_mask


@torch.no_grad()
def predict_positions(
    model: PretrainModel, batch: Batch, mask_ratio: float, position_mask_ratio: float, *, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the positions of the visible patches at any two mask ratios.

    A model trained on one of every 2×2 patches (``sampling: uniform``) sees those at γ = .75.

    Args:
        model: has DropPos attached.
        batch: images with ``index`` and ``epoch``.
        mask_ratio: γ.
        position_mask_ratio: γ_pos.
        seed: of the masks.

    Returns:
        ``logits`` (B, K, N), true positions ``keep`` (B, K), and bool ``dropped`` (B, K).
    """
    objective = model.objectives["droppos"]
    assert isinstance(objective, PositionClassification)
    masks = draw_masks(
        batch,
        model.encoder.grid,
        mask_ratio=mask_ratio,
        position_mask_ratio=position_mask_ratio,
        seed=seed,
        sampling=objective.sampling if mask_ratio == 0.75 else "random",
    )
    batch = {**batch, **masks}
    tokens = model.encode("student", model.images(batch), batch)
    logits = objective({"student": tokens}, batch)["logits"]
    return logits, masks["view/keep"], ~masks["droppos/shown"]


@torch.no_grad()
def patch_weights(model: PretrainModel, batch: Batch) -> Tensor | None:
    """Return the attentive weight of every patch (B, N), as DropPos's loss has them as published.

    Those of the whole image, with all positions, in the trained encoder; None where the recipe
    trains without (``temperature: null``).
    """
    objective = model.objectives["droppos"]
    assert isinstance(objective, PositionClassification)
    if objective.temperature is None:
        return None
    return objective.attentive_weights(model.tokens(model.images(batch).flatten(0, 1)))


@torch.no_grad()
def predict_patches(
    model: PretrainModel, batch: Batch, mask_ratio: float, *, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the position of every patch at any mask ratio.

    Args:
        model: has MP3 attached; as many patches are told their position as in training.
        batch: images with ``index`` and ``epoch``.
        mask_ratio: η.
        seed: of the context.

    Returns:
        ``logits`` (B·V, N, N), and bool (B·V, N) ``context`` and ``asked`` (not told).
    """
    patches = model.encoder.num_patches
    count = num_context(patches, mask_ratio)
    context = draw_patches(batch, patches, count, seed, "mp3/context").flatten(0, 1)
    asked = torch.ones(len(context), patches, dtype=torch.bool, device=context.device)
    content = None
    if "mp3" in model.contents.named:
        told = model.contents.named["mp3"].count
        shown = draw_shown(batch, patches, told, seed)
        content = partial(model.contents, ("mp3",), {"mp3/shown": shown}, EncoderPass())
        asked = ~shown.flatten(0, 1)
    tokens = model.encoder(
        model.images(batch).flatten(0, 1),
        content=content,
        context_BM=context if count < patches else None,
    )
    logits = model.objectives["mp3"]({"student": tokens}, batch)["logits"]
    return logits, slot_mask(context, patches), asked
