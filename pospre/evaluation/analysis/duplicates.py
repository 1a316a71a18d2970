"""Near duplicates: images whose features are almost those of another, as in series and copies.

Features are of the whole encoder: the class token, or the mean of the patches. Every image is
compared with every other one that is drawn, by cosine. Of a sample only the share within it is
known: of one half of the images, half of the pairs' partners are missing. Methods that tell single
images apart (``diet``, DINO's prototypes) learn differences that mean nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.data.opening import open_reader
from pospre.evaluation.analysis.settings import Duplicates
from pospre.evaluation.features import centre_batches, check_images, check_pooling, pool_tokens
from pospre.evaluation.registry import Context, Plan

FIGURES = {"share": "min"}
_LISTED = 20  # pairs
_MANY = 0.05  # share of images that have a near duplicate
_ROWS = 1024  # images compared at once with all others: 40 MB of 10,000


@torch.no_grad()
def evaluate(context: Context, settings: Duplicates) -> dict[str, Any]:
    """Compare images.

    Returns:
        ``share`` of the images that have another one with a cosine above ``similarity``; ``pairs``,
        the most similar of these, by name; and the number of ``images``.
    """
    model, vectors, numbers = context.model, [], []
    pooling = settings.features or ("cls" if model.encoder.has_class_token else "mean")
    sampling = settings.model_copy(update={"num_samples": context.opened})
    for batch in centre_batches(context, sampling):
        tokens = model.encoder(model.images(batch)[:, 0])
        vectors.append(pool_tokens(model, tokens, pooling))
        numbers.append(batch["index"])
    share, cosines, rows = near_duplicates(torch.cat(vectors), settings.similarity)
    of_rows, reader = torch.cat(numbers).tolist(), open_reader(context.data, **context.storage)
    names = [[reader.about(of_rows[row])[1] for row in pair] for pair in rows]
    return {
        "share": share,
        "pairs": [
            {"image": first, "another": second, "cosine": cosine}
            for (first, second), cosine in zip(names, cosines, strict=True)
        ],
        "images": len(of_rows),
        "features": pooling,
    }


def check(plan: Plan[Duplicates]) -> int:
    """Return the number of images; ``UserError`` for one, or for features that are not there."""
    check_pooling(plan)
    return check_images(plan, 2)


def alarms(results: Mapping[str, Any]) -> list[str]:
    """Return a line if many images have a near duplicate."""
    share = results["share"]
    return [f"near duplicates: {share:.0%} of the images have one"] if share > _MANY else []


def near_duplicates(
    vectors_MD: Tensor, similarity: float
) -> tuple[float, list[float], list[list[int]]]:
    """Return the share of vectors that have another one with a larger cosine, and such pairs.

    These are the most similar ones, their cosines first.
    """
    directions = F.normalize(vectors_MD.float(), dim=-1)
    count, has_one = len(directions), torch.zeros(len(directions), dtype=torch.bool)
    best, cells = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for first in range(0, count, _ROWS):
        cosine = directions[first : first + _ROWS] @ directions.T
        cosine.diagonal(offset=first).fill_(-1)
        has_one[first : first + _ROWS] = (cosine > similarity).any(1).cpu()
        once = cosine.triu(first + 1).flatten()
        found = once.topk(min(_LISTED, len(once)))
        best = torch.cat([best, found.values.cpu()])
        cells = torch.cat([cells, found.indices.cpu() + first * count])
    best, order = best.sort(descending=True, stable=True)
    kept = best[:_LISTED] > similarity
    rows = [[*divmod(cell, count)] for cell in cells[order][:_LISTED][kept].tolist()]
    return float(has_one.double().mean()), best[:_LISTED][kept].tolist(), rows
