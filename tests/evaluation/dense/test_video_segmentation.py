"""Video: J, F and propagation against plain formulas, a whole evaluation, bad input."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from sklearn.metrics import jaccard_score

from data_prep.scenes import Settings, render_scenes
from pospre.evaluation.dense.settings import VideoSegmentation
from pospre.evaluation.dense.video import video_segmentation
from pospre.evaluation.dense.video.video_data import open_videos
from pospre.evaluation.dense.video.video_segmentation import (
    contour,
    contour_accuracy,
    propagate,
    region_similarity,
)
from tests.evaluation.dense.pictures import davis_folder, save

Run = Callable[..., dict[str, Any]]


# -- measures -------------------------------------------------------------------------------------


def plain_contour(mask: ndarray) -> list[tuple[int, int]]:
    """Return the pixels unlike the one to the right, below or both, as DAVIS's code finds them."""
    height, width = mask.shape
    found = []
    for y in range(height):
        for x in range(width):
            others = [(y, x + 1), (y + 1, x), (y + 1, x + 1)]
            if y == height - 1 or x == width - 1:
                others = others[:2]
            inside = [(b, a) for b, a in others if b < height and a < width]
            if any(mask[y, x] != mask[b, a] for b, a in inside):
                found.append((y, x))
    return found


def plain_f(found: ndarray, true: ndarray) -> float:
    """Return F by the distances of all pairs of contour pixels."""
    radius = math.ceil(0.008 * math.hypot(*found.shape))
    ours, theirs = plain_contour(found), plain_contour(true)
    if not ours or not theirs:
        return float(not ours and not theirs)

    def near(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> float:
        hits = [any(math.dist(each, other) <= radius for other in others) for each in some]
        return sum(hits) / len(hits)

    precision, recall = near(ours, theirs), near(theirs, ours)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def blob(seed: int, side: tuple[int, int]) -> ndarray:
    """Return a bool mask of two ellipses, which may touch the border."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[: side[0], : side[1]]
    mask = np.zeros(side, bool)
    for _ in range(2):
        centre, radii = generator.random(2) * side, 3 + generator.random(2) * side / 3
        mask |= ((y - centre[0]) / radii[0]) ** 2 + ((x - centre[1]) / radii[1]) ** 2 < 1
    return mask


@pytest.mark.parametrize("side", [(30, 40), (90, 130)])  # tolerances of 1 and 2 pixels
@pytest.mark.parametrize("seed", range(4))
def test_j_and_f_are_those_of_plain_formulas(side: tuple[int, int], seed: int):
    found, true = blob(seed, side), blob(seed + (100 if seed else 0), side)
    true = np.roll(true, seed, axis=1)
    assert sorted(zip(*np.nonzero(contour(found)), strict=True)) == plain_contour(found)
    assert contour_accuracy(found, true) == pytest.approx(plain_f(found, true), abs=1e-12)
    wanted = jaccard_score(true.ravel(), found.ravel())
    assert region_similarity(found, true) == pytest.approx(wanted, abs=1e-12)


def test_objects_that_are_not_there_are_found_by_finding_nothing():
    nothing, something = np.zeros((20, 20), bool), np.eye(20, dtype=bool)
    for measure in (region_similarity, contour_accuracy):
        assert measure(nothing, nothing) == 1.0
        assert measure(nothing, something) == measure(something, nothing) == 0.0


def test_scores_leave_out_the_first_and_last_frame_and_what_counts_for_nothing():
    true = [np.zeros((40, 40), np.int64) for _ in range(5)]
    for frame in true:
        frame[10:30, 10:30] = 3
    true[2][:5] = 255
    predicted = [frame.copy() for frame in true[1:]]
    predicted[0][10:30, 10:20] = 0  # frame 1: half of it
    predicted[1][:5] = 3  # frame 2: more, where nothing counts
    predicted[3][:] = 0  # the last one
    (score,) = video_segmentation.score(predicted, true)
    assert score["J"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert score["J_recall"] == pytest.approx(2 / 3)  # 0.5 is not above 0.5
    assert score["F_recall"] == 1.0 and score["JF"] == (score["J"] + score["F"]) / 2


# -- propagation ----------------------------------------------------------------------------------


def test_attention_to_near_patches_is_that_of_a_plain_loop(monkeypatch):
    monkeypatch.setattr(video_segmentation, "_ROWS", 7)  # several chunks, the last one ragged
    generator = torch.Generator().manual_seed(0)
    rows, columns, radius, neighbours, temperature = 4, 5, 1, 3, 0.1
    features = [torch.randn(rows, columns, 6, generator=generator) for _ in range(4)]
    labels = torch.rand(rows, columns, 2, generator=generator)
    settings = VideoSegmentation(neighbours=neighbours, context_frames=2, radius=radius)
    found = list(propagate(features, labels, settings))
    known = [(features[0], labels)]
    for number, feature in enumerate(features[1:]):
        wanted = torch.zeros(rows, columns, 2)
        context = [known[0], *known[1:][-2:]]
        for y, x in np.ndindex(rows, columns):
            pairs = [
                (float(torch.cosine_similarity(feature[y, x], other[b, a], dim=0)), own[b, a])
                for other, own in context
                for b, a in np.ndindex(rows, columns)
                if max(abs(b - y), abs(a - x)) <= radius
            ]
            best = sorted(pairs, key=lambda pair: -pair[0])[:neighbours]
            weights = [math.exp(cosine / temperature) for cosine, _ in best]
            for weight, (_, label) in zip(weights, best, strict=True):
                wanted[y, x] += weight / sum(weights) * label
        torch.testing.assert_close(found[number], wanted, atol=1e-5, rtol=1e-5)
        known.append((feature, found[number]))


# -- a whole evaluation ---------------------------------------------------------------------------


def test_objects_are_followed_by_their_colours(measure: Run, tmp_path: Path):
    results = measure("video_segmentation", davis_folder(tmp_path), size=64)
    assert results["J"] > 0.75 > 0.6 > results["still_J"]
    assert results["initial_JF"] == results["JF"] and results["JF_difference"] == 0.0
    assert results["JF_se"] is results["JF_difference_se"] is None  # one video
    assert results["JF"] == pytest.approx((results["J"] + results["F"]) / 2)
    assert (results["objects"], results["frames"]) == (2, 5)
    assert results["videos"] == [{"name": "moving", "J": results["J"], "F": results["F"]}]
    blind = measure("video_segmentation", tmp_path, size=64, radius=0, baseline=False)
    assert blind["J"] < results["J"] and blind["initial_JF"] is None


@pytest.mark.parametrize(
    ("frame", "size", "multiple", "patch", "shown"),
    [
        ((480, 854), 480, 64, 16, [480, 832]),  # DINO's script, read for its arithmetic
        ((854, 480), 480, 64, 8, [832, 480]),
        ((480, 910), 480, 64, 8, [480, 896]),
        ((480, 854), 480, None, 14, [476, 854]),
        ((480, 854), None, None, 16, [480, 848]),
        ((480, 480), 500, 64, 16, [496, 496]),
    ],
)
def test_the_sides_of_frames(
    frame: tuple[int, int], size: int | None, multiple: int | None, patch: int, shown: list[int]
):
    assert video_segmentation.scaled_sides(*frame, size, multiple, patch) == shown


def test_errors_are_over_videos_whose_objects_depend_on_each_other():
    alike = [[{"J": value}] * count for value, count in ((0.2, 9), (0.8, 9), (0.5, 9))]
    found = video_segmentation._figures(alike)["J"]
    assert found.value == pytest.approx(0.5) and found.error == pytest.approx(0.3 / 3**0.5)


def test_rendered_tracks_are_followed(measure: Run, tmp_path: Path):
    settings = Settings(num_images=6, size=64, seed=0, split="val", frames=3)
    render_scenes(tmp_path / "tracks", settings, num_workers=1)
    videos = open_videos(str(tmp_path / "tracks"), "2017/val")
    assert [len(video.frames) for video in videos] == [3, 3]
    results = measure("video_segmentation", tmp_path / "tracks", baseline=False, size=None)
    assert results["objects"] == sum(len(video.first_objects()) for video in videos)
    assert 0 < results["J"] < 1


def test_what_stands_still_stays_where_it_is(measure: Run, tmp_path: Path):
    # a disc that no border of a patch of 8 touches, and patches that listen to their own place
    y, x = np.mgrid[:64, :80]
    disc = (np.hypot(y - 31.5, x - 39.5) < 22).astype(np.uint8)
    data = davis_folder(tmp_path)
    for path in data.rglob("0000?.png"):
        save(path, disc)
    results = measure("video_segmentation", data, size=None, radius=0, baseline=False)
    assert results["still_J"] == 1.0 and results["J"] > 0.85
