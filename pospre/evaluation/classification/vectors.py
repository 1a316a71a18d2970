"""One vector per image of an encoder or any of its blocks, by class token or patches' mean."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pospre.evaluation.features import Pooling, centre_batches, pool_tokens, require_labels
from pospre.evaluation.layers import layer_tokens
from pospre.evaluation.registry import Context
from pospre.model.model import PretrainModel

Part = tuple[int | None, Pooling]
"""A layer (0: the embedding, 1: the first block; None: what the encoder returns), and its token."""
Parts = Mapping[Part, Tensor]
"""Vectors (M, D) of M images by part."""


@torch.no_grad()
def encode_parts(
    context: Context,
    models: Mapping[str, PretrainModel],
    data: str,
    parts: Sequence[Part],
    **options: Any,
) -> tuple[dict[str, Parts], Tensor]:
    """Encode the views of a labelled data set, each layer after the encoder's final norm.

    Args:
        context: see ``centre_batches``.
        models: encoders to compare by name; all see the same pixels.
        data: the data set.
        parts: which vectors to keep of each image.
        options: of ``centre_batches``.

    Returns:
        Float32 vectors by model name and part, and the labels (M,), on the CPU.

    Raises:
        UserError: an image has no label.
    """
    found: dict[str, dict[Part, list[Tensor]]] = {
        name: {part: [] for part in parts} for name in models
    }
    labels = [torch.zeros(0, dtype=torch.int64)]
    for batch in centre_batches(context, data, **options):
        labels.append(batch["label"].cpu())
        for name, model in models.items():
            tokens = _tokens(model, model.images(batch)[:, 0], parts)
            for layer, pooling in parts:
                pooled = pool_tokens(model, tokens[layer], pooling)
                found[name][layer, pooling].append(pooled.cpu())
    label_M = torch.cat(labels)
    require_labels(label_M, data)
    return {
        name: {part: torch.cat(vectors) for part, vectors in by_part.items()}
        for name, by_part in found.items()
    }, label_M


def _tokens(
    model: PretrainModel, images_BCHW: Tensor, parts: Sequence[Part]
) -> dict[int | None, Tensor]:
    """Return the tokens by layer; what an encoder returns is the same for those without blocks."""
    layers = sorted({layer for layer, _ in parts if layer is not None})
    if not layers:
        return {None: model.tokens(images_BCHW)}
    return dict(zip(layers, layer_tokens(model, images_BCHW, layers), strict=True))
