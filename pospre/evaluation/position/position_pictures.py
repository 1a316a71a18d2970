"""Pictures reassembled by predicted positions, as in DropPos and MP3 (Fig. 2, 12 to 15).

Three PNGs per image: the original; its visible patches, with those without position scattered over
the free places; and every patch at its predicted position. A green frame marks patches whose
position was given (they stay in place), or which are the context if others are not. Patches at the
same place are averaged; empty places are black.

``mixed`` shuffles the patches of two images together, and reassembles each half as one image (MP3,
Fig. 14, 15). The original then shows both, and a patch is right at its own original place.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pospre import draws
from pospre.batch import INDEX, Batch, flip_key, image_key
from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.common_settings import Sampling
from pospre.evaluation.features import centre_batches
from pospre.evaluation.isolated_method import IsolatedMethod, method_in, takes, views_of
from pospre.evaluation.layers import blank_encoder
from pospre.evaluation.position.mosaic import Puzzle, compose_views, save_png
from pospre.evaluation.position.predictions import Placer
from pospre.evaluation.position.settings import PositionPictures
from pospre.evaluation.registry import Context, Plan
from pospre.model.algorithm import algorithm_class, method_of
from pospre.model.position_task import PositionObjective
from pospre.nn.encoder_interface import patchify, unpatchify
from pospre.training.build import build_model

NEEDS = PositionObjective
VIEWS = ("original", "shuffled", "reconstructed")
_FILE_NAME = re.compile(rf"\d{{8}}_({'|'.join(VIEWS)})\.png")


def evaluate(context: Context, settings: PositionPictures) -> dict[str, Any]:
    """Write the pictures.

    Returns:
        ``pictures``: per image its index, three file names and the share of patches placed
        right.
    """
    assert context.folder is not None  # checked
    count, seed = settings.num_pictures, settings.seed
    sampling = Sampling(num_samples=count, batch_size=min(count, 32), seed=seed)
    views, group = views_of(context.model, NEEDS), context.opened
    batches = centre_batches(context, sampling, view=views)
    pictures: list[dict[str, Any]] = []
    drops = takes(type(method_in(context.model, NEEDS)), "position_mask_ratio")
    shown_ratio = (settings.position_mask_ratio or 0.75) if drops else None
    placer, encoder = Placer(context.model, seed), context.model.encoder
    for batch in batches:
        if settings.mixed:
            batch = {key: value[: len(value) // 2 * 2] for key, value in batch.items()}
            puzzle = _mixed_puzzle(placer, batch, group, settings.mask_ratio, seed)
        else:
            puzzle = _puzzle(placer, batch, group, settings.mask_ratio, shown_ratio, seed)
        originals = _pairs(batch[image_key(group)][:, 0]) if settings.mixed else puzzle.pixels
        pictures += _draw(context.folder, batch[INDEX], puzzle, originals, encoder.patch_size[0])
    _remove_others(context.folder, pictures)
    return {
        "pictures": sorted(pictures, key=lambda picture: picture["index"]),
        **settings.values("mask_ratio", "mixed"),
        "position_mask_ratio": shown_ratio,
    }


def check(plan: Plan[PositionPictures]) -> str:
    """Return the view group to show; ``UserError`` if there is none, or no folder for pictures."""
    reader, settings = open_reader(plan.data), plan.settings
    name, _ = method_of(plan.recipe.algorithms, NEEDS) or ("", {})
    for key in ("mask_ratio", "position_mask_ratio"):
        given = getattr(settings, key)
        if given and not takes(algorithm_class(name), key):
            raise UserError(
                f"{key}={given}, but algorithms.{name} has no such option. Leave it out."
            )
    if settings.mixed:
        _check_mixed(plan, len(reader))
    if plan.recipe.encoder.channels != 3:
        raise UserError(
            "it shows images in red, green and blue, but encoder.channels = "
            f"{plan.recipe.encoder.channels}; position_grid measures the same."
        )
    if plan.folder is None:
        raise UserError("it writes pictures: give --output FILE.json")
    return _shown_group(plan, name)


def _shown_group(plan: Plan[PositionPictures], method: str) -> str:
    """Return the view group whose patches the method places."""
    with torch.device("meta"):
        alone = IsolatedMethod(build_model(plan.recipe), NEEDS, seed=0)
    groups = sorted(alone.groups)
    if len(groups) > 1 or alone.model.grid(groups[0]) != alone.model.encoder.grid:
        raise UserError(
            f"it shows patches of one view at their places in it, but algorithms.{method} reads "
            f"the view groups {', '.join(groups)}, or views of another grid than the encoder's; "
            "position_grid and patch_position measure it."
        )
    return groups[0]


def _check_mixed(plan: Plan, count: int) -> None:
    wanted = plan.settings.num_pictures
    if blank_encoder(plan.recipe).positions.can_forget:
        raise _only_without_positions(f"encoder.positions = {plan.recipe.encoder.positions}")
    if min(wanted, count) < 2 or wanted % 2:
        raise UserError(
            f"mixed=true with num_pictures={wanted} of {count} images; images are mixed in pairs, "
            "so give an even number of at most that many."
        )


def _only_without_positions(by: str) -> UserError:
    return UserError(
        "mixed=true shuffles the patches of two images, which only makes sense if patches have no "
        f"positions, as in algorithms.mp3; here {by} gives them."
    )


def _puzzle(
    placer: Placer,
    batch: Batch,
    group: str,
    mask_ratio: float,
    position_mask_ratio: float | None,
    seed: int,
) -> Puzzle:
    """Return the puzzles of the first view of the group."""
    views = batch[image_key(group)].shape[1]
    logits_BKN, places_BK, asked_BK, context_BK = (
        each[::views] for each in placer(batch, mask_ratio, position_mask_ratio)
    )
    placed_BK = torch.where(asked_BK, logits_BKN.argmax(dim=-1), places_BK)
    strewn_BK = strew(batch[INDEX], places_BK, asked_BK, logits_BKN.shape[-1], seed)
    framed_BK = ~asked_BK if context_BK.all() else ~asked_BK | context_BK
    pixels = batch[image_key(group)][:, 0]
    return Puzzle(pixels, places_BK, framed_BK, asked_BK, strewn_BK, placed_BK, places_BK)


def _mixed_puzzle(placer: Placer, batch: Batch, group: str, mask_ratio: float, seed: int) -> Puzzle:
    """Return the puzzles of images that each hold half of the shuffled patches of a pair."""
    encoder = placer.model.encoder
    patches_BNF = patchify(batch[image_key(group)][:, 0], encoder.patch_size)
    count = patches_BNF.shape[1]
    keys_P = draws.sample_keys(seed, 0, batch[INDEX][::2], 0, "position_pictures/mix")
    order_PM = draws.permutation(keys_P, 2 * count)
    pairs_PMF = patches_BNF.unflatten(0, (-1, 2)).flatten(1, 2)
    rows = torch.arange(len(pairs_PMF), device=order_PM.device).unsqueeze(1)
    halves_BNF = pairs_PMF[rows, order_PM].unflatten(1, (2, count)).flatten(0, 1)
    pixels = unpatchify(halves_BNF, encoder.grid)
    shown = {**batch, image_key(group): pixels.unsqueeze(1)}
    shown[flip_key(group)] = torch.zeros_like(batch[flip_key(group)][:, :1])
    puzzle = _puzzle(placer, shown, group, mask_ratio, None, seed)
    if not puzzle.asked.all():
        raise _only_without_positions("the method")
    true_BN = (order_PM % count).view(len(pixels), count)
    return puzzle._replace(strewn=puzzle.keep, true=true_BN.gather(1, puzzle.keep))


def _pairs(pixels_BCHW: Tensor) -> Tensor:
    """Return each image with its partner beside it, (B, C, H, 2W)."""
    both = torch.cat([pixels_BCHW[::2], pixels_BCHW[1::2]], dim=3)
    return both.repeat_interleave(2, dim=0)


def _draw(
    folder: Path, index_B: Tensor, puzzle: Puzzle, originals_BCHW: Tensor, patch_size: int
) -> list[dict[str, Any]]:
    """Write the pictures of a batch; return the results for its images."""
    pictures = []
    for row, index in enumerate(index_B.tolist()):
        one, original = Puzzle(*(each[row] for each in puzzle)), originals_BCHW[row]
        names = {view: f"{index:08d}_{view}.png" for view in VIEWS}
        for view, picture in compose_views(one, original, patch_size).items():
            save_png(picture, folder / names[view])
        right_K = (one.placed == one.true)[one.asked]
        pictures.append({"index": index, **names, "accuracy": float(right_K.double().mean())})
    return pictures


def strew(
    index_B: Tensor, keep_BK: Tensor, dropped_BK: Tensor, num_patches: int, seed: int
) -> Tensor:
    """Return a place (B, K) for each visible patch: its own if shown, else a random free one."""
    keys_B = draws.sample_keys(seed, 0, index_B, 0, "position_pictures/strew")
    order_BN = draws.permutation(keys_B, num_patches)
    taken_BN = torch.zeros_like(order_BN, dtype=torch.bool).scatter_(1, keep_BK, ~dropped_BK)
    free_first = taken_BN.gather(1, order_BN).int().argsort(dim=1, stable=True)
    nth_BK = (dropped_BK.cumsum(1) - 1).clamp_min(0)
    return torch.where(dropped_BK, order_BN.gather(1, free_first).gather(1, nth_BK), keep_BK)


def _remove_others(folder: Path, pictures: list[dict[str, Any]]) -> None:
    """Delete the pictures of an earlier evaluation."""
    current = {picture[view] for picture in pictures for view in VIEWS}
    for path in folder.glob("*.png"):
        if _FILE_NAME.fullmatch(path.name) and path.name not in current:
            path.unlink()
