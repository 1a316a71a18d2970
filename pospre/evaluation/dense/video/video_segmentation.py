"""Video object segmentation on DAVIS by label propagation of frozen features (DINO, StoP).

The objects of a video's first frame are tracked without training. Every patch takes the labels of
its most similar patches in the first frame and in the last few. The figures are the mean and recall
(share of frames above 0.5) of J (intersection over union) and F (contour). They are averaged over
an object's frames, except the first and the last, then over objects. Published: size=480,
multiple=64, 5 neighbours, 7 frames, radius 12, T = 0.1, on the list 2017/val.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.dense.images import check_not_smaller, decoding_of, image_sides, in_half
from pospre.evaluation.dense.maps import FeatureMaps, check_encoder
from pospre.evaluation.dense.settings import VideoSegmentation
from pospre.evaluation.dense.video.video_data import VOID, Video, check_video, open_videos
from pospre.evaluation.estimates import Estimate, share, with_differences
from pospre.evaluation.registry import Context, Plan
from pospre.model.model import PretrainModel

FIGURES = {"JF": "max", "J": "max", "F": "max"}
OWN_DATA = True
UNITS = "videos"
_ENOUGH = 0.5
_TOLERANCE = 0.008  # of the diagonal
_ROWS = 1024  # patches at once: with 8 frames of 6000 patches, similarities take 200 MB


def evaluate(context: Context, settings: VideoSegmentation) -> dict[str, Any]:
    """Track objects through videos.

    Returns:
        ``J``, ``F``, their recalls (``…_recall``) and ``JF``, the mean of J and F, over objects, in
        [0, 1], with standard errors over videos (``_se``), because objects of a video depend on
        each other; the same for the untrained encoder (``initial_…``), with the differences to it
        (``…_difference``) and their paired errors, and for keeping the first mask (``still_…``);
        ``videos``: J and F of each.
    """
    videos: list[Video] = context.opened
    models = context.models(baseline=settings.baseline)
    scores: dict[str, list[list[dict[str, float]]]] = {name: [] for name in [*models, "still_"]}
    rows = []
    for video in context.track(videos, "video_segmentation", unit="video"):
        true = [video.objects(index) for index in range(len(video.frames))]
        for name, model in models.items():
            predicted = follow(context, model, video, settings)
            scores[name].append(score(list(predicted), true))
        scores["still_"].append(score([true[0]] * (len(true) - 1), true))
        own = scores[""][-1]
        rows.append({"name": video.name, **{key: _mean(own, key) for key in _MEASURES}})
    return {
        **with_differences({name: _figures(scored) for name, scored in scores.items()}),
        "videos": rows,
        "objects": sum(map(len, scores[""])),
        "frames": sum(len(video.frames) for video in videos),
    }


def check(plan: Plan[VideoSegmentation]) -> list[Video]:
    """Return the videos; raise a ``UserError`` for invalid masks or frames."""
    encoder = check_encoder(plan)
    if not encoder.positions.takes_any_grid:
        raise UserError(
            f"it uses frames of their own size, but encoder.positions = {encoder.positions.name} "
            f"supports only the encoder's {encoder.image_size[0]}×{encoder.image_size[1]}."
        )
    settings, patch = plan.settings, encoder.patch_size[0]
    multiple = settings.multiple or 0
    if multiple % patch:
        raise UserError(
            f"multiple={multiple} is not a multiple of the patch size {patch}; use "
            f"{max(1, round(multiple / patch)) * patch}."
        )
    videos = open_videos(plan.data, settings.split, decoding_of(plan.recipe))
    videos = in_half(videos, settings.half, plan.data)[: settings.num_videos]
    for video in videos:
        check_video(video)
        height, width = image_sides(video.frames[0])
        factor = 1.0 if settings.size is None else settings.size / min(height, width)
        sides = (height * factor, width * factor)
        check_not_smaller(video.frames[0], sides, patch)
        if max(sides) < multiple:
            raise UserError(
                f"multiple={multiple}, but the sides of {video.frames[0]} are scaled to at most "
                f"{max(sides):.0f} pixels; leave it out, or give a larger size."
            )
    return videos


def images(opened: list[Video]) -> int:
    """Return the number of videos to measure."""
    return len(opened)


@torch.no_grad()
def follow(
    context: Context, model: PretrainModel, video: Video, settings: VideoSegmentation
) -> Iterator[ndarray]:
    """Yield the predicted objects, int64 (H, W), of every frame after the first."""
    objects, ids = video.objects(0), [0, *video.first_objects()]
    maps = FeatureMaps(model, (model.encoder.depth,), norm=True)
    features = (
        _features(context, maps, video, index, settings) for index in range(len(video.frames))
    )
    first = next(features)
    one_hot = torch.from_numpy(np.stack([objects == value for value in ids], axis=-1)).float()
    labels = F.interpolate(one_hot.permute(2, 0, 1)[None], first.shape[:2], mode="nearest-exact")
    labels_hwC = labels[0].permute(1, 2, 0).to(first)
    for shares_hwC in propagate(itertools.chain([first], features), labels_hwC, settings):
        yield np.array(ids)[_decide(shares_hwC, objects.shape)]


def propagate(
    features: Iterable[Tensor], labels_hwC: Tensor, settings: VideoSegmentation
) -> Iterator[Tensor]:
    """Yield the labels (h, w, C), shares of classes, of every frame after the first.

    The features of a frame are (h, w, D), ``labels_hwC`` the first frame's labels. A patch takes
    those of its most similar patches within a radius (Caron et al. 2021; Jabri 2020).
    """
    frames = (F.normalize(each.flatten(0, 1), dim=-1) for each in features)
    rows, columns = labels_hwC.shape[:2]
    near_NN = _near(rows, columns, settings.radius).to(labels_hwC.device)
    first = next(frames), labels_hwC.flatten(0, 1)
    known: deque[tuple[Tensor, Tensor]] = deque(maxlen=settings.context_frames)
    for queries_ND in frames:
        keys_KD, labels_KC = map(torch.cat, zip(first, *known, strict=True))
        labels_NC = _attend(queries_ND, keys_KD, labels_KC, near_NN, settings)
        known.append((queries_ND, labels_NC))
        yield labels_NC.unflatten(0, (rows, columns))


def _attend(
    queries_ND: Tensor,
    keys_KD: Tensor,
    labels_KC: Tensor,
    near_NN: Tensor,
    settings: VideoSegmentation,
) -> Tensor:
    """Return labels (N, C): the mean of the most similar patches', weighted by exp(cosine / T).

    Queries are a frame's normalised features, keys those of other frames. ``near_NN`` says whether
    a patch (row) may use one of another frame (column).
    """
    frames, parts = len(keys_KD) // len(near_NN), []
    for start in range(0, len(queries_ND), _ROWS):
        rows = slice(start, start + _ROWS)
        cosine = queries_ND[rows] @ keys_KD.T
        cosine = cosine.masked_fill(~near_NN[rows].repeat(1, frames), -torch.inf)
        best = cosine.topk(min(settings.neighbours, len(keys_KD)), dim=1)
        weights = (best.values / settings.temperature).softmax(dim=1)
        parts.append((weights.unsqueeze(-1) * labels_KC[best.indices]).sum(1))
    return torch.cat(parts)


def _near(rows: int, columns: int, radius: int) -> Tensor:
    """Return bool (N, N): whether two patches lie within ``radius`` in both directions.

    Computed as a product of rows and columns: offsets of 6000 × 6000 patches would take a gigabyte.
    """
    row, column = (
        (torch.arange(side)[:, None] - torch.arange(side)).abs() <= radius
        for side in (rows, columns)
    )
    return torch.kron(row, column)


def _features(
    context: Context, maps: FeatureMaps, video: Video, index: int, settings: VideoSegmentation
) -> Tensor:
    """Return the features (h, w, D) of a scaled frame."""
    pixels = video.image(index)[None]
    height, width = pixels.shape[-2:]
    patch = maps.model.encoder.patch_size[0]
    sides = scaled_sides(height, width, settings.size, settings.multiple, patch)
    levels = F.interpolate(
        pixels.to(context.device).float(), sides, mode="bilinear", antialias=True
    )
    (tokens_1Dhw,) = maps(maps.model.augment.normalise(levels))
    context.go_on()
    return tokens_1Dhw[0].permute(1, 2, 0)


def scaled_sides(
    height: int, width: int, size: int | None, multiple: int | None, patch: int
) -> list[int]:
    """Return height and width of a scaled frame; see ``evaluate``."""
    factor = 1.0 if size is None else size / min(height, width)
    sides = [max(1, round(side * factor / patch)) * patch for side in (height, width)]
    if multiple is not None and height != width:
        sides[0 if height > width else 1] = int(max(height, width) * factor) // multiple * multiple
    return sides


def _decide(shares_hwC: Tensor, sides: tuple[int, ...]) -> ndarray:
    """Return the class (H, W) of the largest share, with each class stretched to [0, 1] first."""
    shares = shares_hwC.permute(2, 0, 1)[None]
    shares = F.interpolate(shares, sides, mode="bilinear")[0]
    low, high = shares.amin((1, 2), keepdim=True), shares.amax((1, 2), keepdim=True)
    stretched = torch.where(high > 0, (shares - low) / (high - low).clamp_min(1e-12), shares)
    return stretched.argmax(0).cpu().numpy()


def region_similarity(predicted_HW: ndarray, true_HW: ndarray) -> float:
    """Return DAVIS's J: intersection over union of two bool masks; 1 if both are empty."""
    union = (predicted_HW | true_HW).sum()
    return float((predicted_HW & true_HW).sum() / union) if union else 1.0


def contour_accuracy(predicted_HW: ndarray, true_HW: ndarray) -> float:
    """Return F (Perazzi et al. 2016): harmonic mean of precision and recall of masks' contours.

    A contour pixel is correct if the other contour passes within ⌈0.008 · diagonal⌉ pixels.
    """
    radius = np.ceil(_TOLERANCE * np.linalg.norm(predicted_HW.shape))
    predicted, true = contour(predicted_HW), contour(true_HW)
    if not predicted.any() and not true.any():
        return 1.0
    if not predicted.any() or not true.any():
        return 0.0
    precision = (distance_transform_edt(~true)[predicted] <= radius).mean()
    recall = (distance_transform_edt(~predicted)[true] <= radius).mean()
    total = precision + recall
    return float(2 * precision * recall / total) if total else 0.0


def contour(mask_HW: ndarray) -> ndarray:
    """Return bool: pixels that differ from their right, lower or lower right neighbour."""
    padded = np.pad(mask_HW, ((0, 1), (0, 1)), mode="edge")
    right, below, both = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    return (mask_HW != right) | (mask_HW != below) | (mask_HW != both)


_MEASURES = {"J": region_similarity, "F": contour_accuracy}


def score(predicted: list[ndarray], true: list[ndarray]) -> list[dict[str, float]]:
    """Return J, F and their recalls of every object, over all frames but the first and the last.

    Objects (H, W) are predicted for every frame after the first. ``VOID`` pixels are ignored.
    """
    results = []
    for number in sorted(set(np.unique(true[0]).tolist()) - {0, VOID}):
        values: dict[str, list[float]] = {name: [] for name in _MEASURES}
        for mask, wanted in zip(predicted[:-1], true[1:-1], strict=True):
            counts = wanted != VOID
            for name, measure in _MEASURES.items():
                values[name].append(measure((mask == number) & counts, wanted == number))
        means = {name: float(np.mean(each)) for name, each in values.items()}
        recalls = {f"{n}_recall": float(np.mean(np.array(v) > _ENOUGH)) for n, v in values.items()}
        results.append({**means, **recalls, "JF": (means["J"] + means["F"]) / 2})
    return results


def _figures(videos: list[list[dict[str, float]]]) -> dict[str, Estimate]:
    """Return the means over the objects of all videos, and without each video."""
    counts_M = torch.tensor([len(objects) for objects in videos])
    sums = {key: [sum(each[key] for each in objects) for objects in videos] for key in videos[0][0]}
    return {
        key: share(torch.tensor(each, dtype=torch.float64), counts_M) for key, each in sums.items()
    }


def _mean(objects: list[dict[str, float]], key: str) -> float:
    return float(np.mean([each[key] for each in objects]))
