import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from data_prep import scenes
from data_prep.rendering import CLASSES, KINDS, draw_scene, render
from pospre.errors import run_command
from tests.data_prep.reading import Says
from tests.disk import snapshot

SIZE = 64


def run(target: Path, *options: object) -> int:
    arguments = [str(target), "--size", str(SIZE), *map(str, options)]
    return run_command(lambda: scenes.main(arguments))


def mask_of(encoded: dict[str, Any]) -> np.ndarray:
    """Decode COCO's run lengths: uint8 (H, W)."""
    height, width = encoded["size"]
    values = np.arange(len(encoded["counts"])) % 2
    return np.repeat(values, encoded["counts"]).astype(np.uint8).reshape(width, height).T


def labels_of(target: Path) -> list[dict]:
    return [json.loads(line) for line in (target / "labels.jsonl").read_text().splitlines()]


def test_labels_describe_the_pictures(tmp_path: Path) -> None:
    target = tmp_path / "scenes"
    assert run(target, "--num-images", 60, "--workers", 2) == 0
    labels = labels_of(target)
    found = sorted(path.relative_to(target).as_posix() for path in target.rglob("*.jpg"))
    assert sorted(label["path"] for label in labels) == found and len(found) == 60
    assert {label["class"] for label in labels} == set(CLASSES)
    for label in labels:
        assert Image.open(target / label["path"]).size == (SIZE, SIZE)
        assert label["path"].startswith(label["class"] + "/")
        objects = label["objects"]
        assert max(objects, key=lambda item: item["area"])["class"] == label["class"]
        assert sum(label["counts"].values()) == len(objects)
        distances = [item["distance"] for item in objects]
        assert distances == sorted(distances, reverse=True)
        masks = [mask_of(item["mask"]) for item in objects]
        assert np.sum(masks, axis=0).max() <= 1, "every pixel belongs to one object"
        for item, mask in zip(objects, masks, strict=True):
            left, top, right, bottom = item["box"]
            assert mask.shape == (SIZE, SIZE) and mask.sum() == item["area"] > 0
            assert mask[top:bottom, left:right].sum() == item["area"]
            assert mask[top].any() and mask[bottom - 1].any()
            assert mask[:, left].any() and mask[:, right - 1].any()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, options in {"a": ["--workers", 1], "b": ["--workers", 3]}.items():
        assert run(tmp_path / name, "--num-images", 24, *options) == 0
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    assert run(tmp_path / "more", "--num-images", 30, "--workers", 1) == 0
    more = snapshot(tmp_path / "more")
    for name, data in snapshot(tmp_path / "a").items():
        assert not name.endswith(".jpg") or more[name] == data, "more pictures change none"


def test_seed_and_split_change_every_scene() -> None:
    pictures = [
        render(draw_scene(seed, number, split), 32)[0].tobytes()
        for seed in (0, 1)
        for split in ("train", "val")
        for number in range(8)
    ]
    assert len(set(pictures)) == len(pictures)


def test_frames_are_tracks(tmp_path: Path) -> None:
    target = tmp_path / "tracks"
    assert run(target, "--num-images", 22, "--frames", 4, "--workers", 1) == 0
    labels = labels_of(target)
    assert len(labels) == 22
    assert [label["frame"] for label in labels] == [index % 4 for index in range(22)]
    for label in labels:
        first = labels[4 * label["scene"]]
        assert label["class"] == first["class"] and label["kind"] == first["kind"]
        colours = {item["id"]: item["colour"] for item in first["objects"]}
        for item in label["objects"]:
            assert colours.get(item["id"], item["colour"]) == item["colour"]
    moved = [
        labels[index]["objects"][-1]["box"] != labels[index + 3]["objects"][-1]["box"]
        for index in range(0, 20, 4)
    ]
    assert sum(moved) >= 4


def test_position_shows_in_the_picture() -> None:
    """Sky and ground differ in every scene: the row of a patch can be told from its colours."""
    for number in range(40):
        picture, _ = render(draw_scene(0, number, "train"), 64)
        top, bottom = picture[:8].astype(float), picture[-8:].astype(float)
        assert np.abs(top.mean((0, 1)) - bottom.mean((0, 1))).max() > 8


def test_classes_can_be_learnt_and_are_not_given_away() -> None:
    """Nearest neighbours on tiny pictures beat chance by far, yet leave room for features."""

    def tiny(split: str, num: int) -> tuple[np.ndarray, np.ndarray]:
        pictures, names = [], []
        for number in range(num):
            pixels, objects = render(draw_scene(0, number, split), 32)
            pictures.append(pixels.reshape(8, 4, 8, 4, 3).mean((1, 3)).ravel())
            names.append(max(objects, key=lambda item: item["area"])["class"])
        features = np.array(pictures) - np.mean(pictures, axis=0)
        return features / np.linalg.norm(features, axis=1, keepdims=True), np.array(names)

    bank, bank_names = tiny("train", 450)
    query, query_names = tiny("val", 90)
    nearest = bank_names[np.argmax(query @ bank.T, axis=1)]
    accuracy = (nearest == query_names).mean()
    assert 1.5 / len(CLASSES) < accuracy < 0.9


def test_every_kind_and_class_appears() -> None:
    drawn = [draw_scene(0, number, "train") for number in range(120)]
    assert {scene.kind for scene in drawn} == set(KINDS)
    assert {len(scene.objects) for scene in drawn} == {1, 2, 3, 4, 5, 6}


@given(
    arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.integers(0, 1))
)
@settings(max_examples=100)
def test_run_lengths_round_trip(mask: np.ndarray) -> None:
    encoded = scenes.run_lengths(mask)
    assert sum(encoded["counts"]) == mask.size
    assert sum(encoded["counts"][1::2]) == mask.sum()
    assert (mask_of(encoded) == mask).all()


def test_existing_destination(tmp_path: Path, refused: Says, printed: Says) -> None:
    target = tmp_path / "scenes"
    options = ["--num-images", 6, "--workers", 1]
    assert run(target, *options) == 0
    assert "already contains these scenes" in printed(run, target, *options)
    assert "--overwrite" in refused(run, target, *options, "--seed", 1)
    assert run(target, *options, "--seed", 1, "--overwrite") == 0
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    assert run(tmp_path / "home", *options, "--overwrite") == 2
    assert (tmp_path / "home" / "thesis.tex").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "scenes"]
