"""Pictures put together by predicted positions (as in Fig. 2 of MP3, Zhai et al. 2022).

Three PNGs per image: the original; its visible patches with those that lost their position strewn
over the free places; and every patch at the position the model predicts for it. Patches whose
position the model was shown stay in place with a green frame; patches that meet in one place are
averaged; places that no patch goes to are black.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import PositiveInt
from torch import Tensor

from pospre import draws
from pospre.batch import Batch
from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.features import centre_batches
from pospre.evaluation.position.mosaic import enlarge, frame_cells, place_patches
from pospre.evaluation.position.predictions import predict_positions
from pospre.evaluation.registry import Context, Plan
from pospre.evaluation.table import format_table, percent
from pospre.nn.decoder import patchify
from pospre.recipe.ranges import PositiveShare, Ratio

NEEDS = "droppos"
VIEWS = ("original", "shuffled", "reconstructed")
_FILE_NAME = re.compile(rf"\d{{8}}_({'|'.join(VIEWS)})\.png")
SHORTEST_SIDE = 224  # pixels of a written picture; smaller images are enlarged in whole steps


def evaluate(
    context: Context,
    *,
    num_pictures: PositiveInt = 8,
    mask_ratio: Ratio = 0.0,
    position_mask_ratio: PositiveShare = 0.75,
    seed: int = 0,
) -> dict[str, Any]:
    """Write the pictures.

    Args:
        context: model, data, device and the folder to write to.
        num_pictures: how many images, drawn by the seed.
        mask_ratio: share of patches that the model does not see.
        position_mask_ratio: share of the visible patches whose position it must predict.
        seed: of the drawn images and of the masks.

    Returns:
        ``pictures``: per image its index, three file names and the share of patches put right.

    Raises:
        UserError: the pictures cannot be written.
    """
    assert context.folder is not None  # checked
    batches = centre_batches(
        context,
        context.data,
        title="position_pictures",
        num_samples=num_pictures,
        batch_size=min(num_pictures, 32),
        num_workers=None,
        seed=seed,
    )
    pictures: list[dict[str, Any]] = []
    for batch in batches:
        predicted = predict_positions(
            context.model,
            batch,
            mask_ratio=mask_ratio,
            position_mask_ratio=position_mask_ratio,
            seed=seed,
        )
        pictures += _draw(context, context.folder, batch, predicted, seed)
    _remove_others(context.folder, pictures)
    return {
        "pictures": sorted(pictures, key=lambda picture: picture["index"]),
        "mask_ratio": mask_ratio,
        "position_mask_ratio": position_mask_ratio,
    }


def check(plan: Plan) -> None:
    """Raise a ``UserError`` where there is nothing to show, or no folder for the pictures."""
    open_reader(plan.data)
    if plan.recipe.encoder.channels != 3:
        raise UserError(
            "position_pictures shows images in red, green and blue, but encoder.channels = "
            f"{plan.recipe.encoder.channels}; position_grid measures the same."
        )
    if plan.folder is None:
        raise UserError("position_pictures writes pictures: say where with --output FILE.json")
    if plan.folder.exists() and not plan.folder.is_dir():
        raise UserError(f"position_pictures writes to the folder {plan.folder}, which is a file")


def _draw(
    context: Context,
    folder: Path,
    batch: Batch,
    predicted: tuple[Tensor, Tensor, Tensor],
    seed: int,
) -> list[dict[str, Any]]:
    """Write the pictures of a batch; return what the results say about each of its images."""
    logits_BKN, keep_BK, dropped_BK = predicted
    placed_BK = torch.where(dropped_BK, logits_BKN.argmax(dim=-1), keep_BK)
    strewn_BK = strew(batch["index"], keep_BK, dropped_BK, logits_BKN.shape[-1], seed)
    pictures = []
    for row, index in enumerate(batch["index"].tolist()):
        views = compose_views(
            batch["view/image"][row, 0],
            context.model.encoder.patch_size[0],
            keep_K=keep_BK[row],
            shown_K=~dropped_BK[row],
            strewn_K=strewn_BK[row],
            placed_K=placed_BK[row],
        )
        right_K = (placed_BK[row] == keep_BK[row])[dropped_BK[row]]
        names = _write(folder, index, views)
        pictures.append({"index": index, **names, "accuracy": float(right_K.double().mean())})
    return pictures


def strew(
    index_B: Tensor, keep_BK: Tensor, dropped_BK: Tensor, num_patches: int, seed: int
) -> Tensor:
    """Return a place (B, K) for each visible patch: its own where shown, a random free one else."""
    keys_B = draws.sample_keys(seed, 0, index_B, 0, "position_pictures/strew")
    order_BN = draws.permutation(keys_B, num_patches)
    strewn_BK = keep_BK.clone()
    for row in range(len(keep_BK)):
        taken_N = torch.zeros(num_patches, dtype=torch.bool, device=keep_BK.device)
        taken_N[keep_BK[row][~dropped_BK[row]]] = True
        free = order_BN[row][~taken_N[order_BN[row]]]
        strewn_BK[row, dropped_BK[row]] = free[: int(dropped_BK[row].sum())]
    return strewn_BK


def compose_views(
    image_3HW: Tensor,
    patch_size: int,
    *,
    keep_K: Tensor,
    shown_K: Tensor,
    strewn_K: Tensor,
    placed_K: Tensor,
) -> dict[str, np.ndarray]:
    """Return the three pictures of one image, uint8 (H', W', 3), enlarged in whole steps.

    Args:
        image_3HW: uint8 pixels.
        patch_size: side of a patch in pixels.
        keep_K: true positions of the visible patches.
        shown_K: bool, which of them keep their position.
        strewn_K: their places in the shuffled picture.
        placed_K: their places in the reconstructed picture.
    """
    patches_NF = patchify(image_3HW[None], (patch_size, patch_size))[0]
    grid = (image_3HW.shape[1] // patch_size, image_3HW.shape[2] // patch_size)
    factor = -(-SHORTEST_SIDE // min(image_3HW.shape[1:]))
    views = {"original": enlarge(image_3HW.permute(1, 2, 0).cpu().numpy(), factor)}
    for name, places_K in (("shuffled", strewn_K), ("reconstructed", placed_K)):
        mosaic = place_patches(patches_NF[keep_K], places_K, grid)
        picture = enlarge(mosaic.permute(1, 2, 0).cpu().numpy(), factor)
        frame_cells(picture, keep_K[shown_K].tolist(), grid[1], patch_size * factor)
        views[name] = picture
    return views


def _write(folder: Path, index: int, views: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write the pictures of sample ``index``; return their file names by view."""
    names = {view: f"{index:08d}_{view}.png" for view in VIEWS}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for view, name in names.items():
            Image.fromarray(views[view]).save(folder / name, optimize=True)
    except OSError as error:
        raise UserError(f"pictures cannot be written to {folder}: {error}") from error
    return names


def _remove_others(folder: Path, pictures: list[dict[str, Any]]) -> None:
    """Delete the pictures of an earlier evaluation, which no JSON names any more."""
    current = {picture[view] for picture in pictures for view in VIEWS}
    for path in folder.glob("*.png"):
        if _FILE_NAME.fullmatch(path.name) and path.name not in current:
            path.unlink()


def table(results: Mapping[str, Any]) -> str:
    """Return the pictures and their accuracies as text."""
    rows = [
        [str(picture["index"]), percent(picture["accuracy"]), picture["reconstructed"]]
        for picture in results["pictures"]
    ]
    ratios = f"γ = {results['mask_ratio']}, γ_pos = {results['position_mask_ratio']}"
    return format_table(f"Pictures ({ratios})", ["sample", "patches put right in %", "file"], rows)
