"""PCK: its golden numbers, the conventions of published codes, and the layouts of data sets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.dense.correspondence.correspondence import _summary
from pospre.evaluation.dense.correspondence.matching import (
    Coordinates,
    apply_homography,
    match_points,
    per_point,
    read_points,
    shares,
)
from pospre.evaluation.dense.correspondence.pairs import (
    change_colours,
    draw_homographies,
    homography_pair,
    warped,
)
from tests.conftest import jpeg
from tests.evaluation.checkpoints import results_of, tiny_recipe

SIZE, GRID = 128, 8


def points_everywhere() -> Tensor:
    steps = torch.arange(SIZE) + 0.5
    return torch.cartesian_prod(steps, steps)


def matched(mirror: bool, coordinates: Coordinates) -> Tensor:
    """Return the errors in pixels of perfect features: every cell has its own."""
    source = torch.eye(GRID * GRID).view(-1, GRID, GRID)
    target = source.flip(2) if mirror else source
    points = points_everywhere()
    found = match_points(
        read_points(source, points, SIZE, coordinates), target, SIZE, coordinates=coordinates
    )
    expected = torch.stack([SIZE - points[:, 0], points[:, 1]], 1) if mirror else points
    return (found - expected).norm(dim=1)


@pytest.mark.parametrize(
    ("coordinates", "mirror", "share"),
    [
        ("ours", False, 1.0),
        ("ours", True, 1.0),
        ("probe3d", False, 0.475),
        ("probe3d", True, 0.475),
        ("insid3", False, 0.936),
        ("insid3", True, 0.290),
    ],
)
def test_conventions_are_worth_points(coordinates: Coordinates, mirror: bool, share: float) -> None:
    errors = matched(mirror, coordinates)
    assert float((errors <= 0.1 * SIZE).double().mean()) == pytest.approx(share, abs=0.01)
    if coordinates == "ours":
        assert errors.square().mean().sqrt() == pytest.approx(6.53, abs=0.015)


def test_pck_is_per_image_or_per_point() -> None:
    errors = [torch.tensor(each) for each in ([3.0], [3.0, 11.0, 12.0, 30.0], [10.0, 10.0001])]
    assert float(shares(errors, 10).mean()) == pytest.approx(0.583333, abs=1e-6)
    assert per_point(errors, 10) == pytest.approx(0.285714, abs=1e-6)
    found = _summary("", errors, ["b", "a", "b"], [10])
    assert found["per_image_of_classes"]["10"] == pytest.approx((0.25 + 0.75) / 2)
    assert found["per_point_of_classes"]["10"] == pytest.approx((0.25 + 1 / 3) / 2)
    other = _summary("", [errors[place] for place in (2, 0, 1)], ["b", "b", "a"], [10])
    assert other == {key: pytest.approx(value) for key, value in found.items()}  # of any order


def test_homographies_move_points_and_pixels_alike() -> None:
    matrix = torch.tensor([[2.0, 0, 10], [0, 1, -5], [0, 0, 1]])
    assert apply_homography(matrix, torch.tensor([[10.0, 20]])).tolist() == [[30, 15]]
    matrix = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.01, 0, 1]])
    assert apply_homography(matrix, torch.tensor([[100.0, 50]])).tolist() == [[50, 25]]
    drawn = draw_homographies(0, torch.arange(50), 64)
    assert torch.equal(drawn[7], draw_homographies(0, torch.tensor([7]), 64)[0])
    turns = torch.linalg.det(drawn[:, :2, :2]) < 0
    assert 10 < int(turns.sum()) < 40  # about every second one is mirrored
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    image = torch.stack([columns + 0.5, rows + 0.5, torch.full((64, 64), 9.0)])  # its own places
    moved = warped(image, drawn[3])
    for x, y in ((20.5, 30.5), (40.5, 33.5)):
        here = moved[:, int(y), int(x)]
        if here[2] == 9:  # from inside
            expected = apply_homography(drawn[3].float(), here[None, :2])
            assert torch.allclose(expected, torch.tensor([[x, y]]), atol=0.01)


def test_an_image_finds_itself_by_any_distinct_patches() -> None:
    torch.manual_seed(0)
    features, points = torch.randn(512, GRID, GRID), points_everywhere()
    for match in ("argmax", "kernel"):
        found = match_points(read_points(features, points, SIZE), features, SIZE, match=match)
        errors = (found - points).norm(dim=1)
        assert match == "kernel" or bool((errors <= 0.1 * SIZE).all())
        assert float(errors.mean()) < SIZE / 4


def test_a_pair_is_a_function_of_its_index() -> None:
    levels = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1)) * 255
    first, again = (homography_pair(levels, lambda x: x / 255, 0, 5, 64) for _ in range(2))
    other = homography_pair(levels, lambda x: x / 255, 0, 6, 64)
    assert first is not None and again is not None and other is not None
    assert torch.equal(first.images_2CHW, again.images_2CHW)
    assert not torch.equal(first.images_2CHW[1], other.images_2CHW[1])
    assert not torch.equal(change_colours(levels, 0, 5), levels)
    inside = (first.target_K2 >= 0) & (first.target_K2 <= 64)
    assert inside.all() and first.extent == 64


def test_any_images_are_measured_by_homographies(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    data, recipe = image_folder(num_images=4), tiny_recipe(tmp_path, "mae")
    found = results_of("correspondence", recipe, data, alpha=(0.1, 0.5))
    assert found["kind"].startswith("homographies") and found["pairs"] == 4
    assert found["per_image"]["0.1"] == found["pck"] <= found["per_image"]["0.5"]
    assert 0 <= found["same_place"] <= 1 and "per_image_of_classes" not in found
    assert found["pck_difference"] == pytest.approx(found["pck"] - found["initial_pck"])
    again = results_of("correspondence", recipe, data, alpha=(0.1, 0.5), batch_size=1)
    assert again == found
    few = results_of("correspondence", recipe, data, num_samples=2, match="kernel", layer=1)
    assert few["pairs"] == 2 and few["layer"] == 1


def write_spair(root: Path, **changes: Any) -> Path:
    """Write two pairs of an image with itself and with its mirrored points."""
    name = "000001-a-b:cat"
    annotation: dict[str, Any] = {
        "src_imname": "a.jpg",
        "trg_imname": "a.jpg",
        "category": "cat",
        "src_kps": [[10, 8], [40.5, 30]],
        "trg_kps": [[10, 8], [40.5, 30]],
        "trg_bndbox": [5, 5, 70, 50],
        **changes,
    }
    for folder in ("Layout/large", "PairAnnotation/test", "JPEGImages/cat"):
        (root / folder).mkdir(parents=True)
    (root / "JPEGImages/cat/a.jpg").write_bytes(jpeg(0, 80, 60))
    (root / "Layout/large/test.txt").write_text(f"{name}\n")
    (root / f"PairAnnotation/test/{name}.json").write_text(json.dumps(annotation))
    return root


def test_spair_is_measured_in_pixels_of_its_images(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "mae", positions="sincos")
    found = results_of("correspondence", recipe, write_spair(tmp_path / "spair"), alpha=(0.1, 0.3))
    assert (found["kind"], found["pairs"], found["points"]) == ("SPair-71k", 1, 2)
    assert found["per_image_of_classes"] == found["per_image"] and found["same_place"] == 1
    # a cell's centre is at most 11 × 9 px of the image away; the box has a side of 65
    assert found["per_point"]["0.3"] == 1


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"trg_kps": [[1, 2]]}, {}, "its points are not in pairs"),
        ({"src_kps": [[1, "x"], [2, 3]]}, {}, "are not rows of 2 numbers"),
        ({"trg_bndbox": [1, 2, 1, 2]}, {}, "its box is empty"),
        ({"src_imname": "../a.jpg"}, {}, "leads out of the data set"),
        ({"trg_imname": "b.jpg"}, {}, "b.jpg does not exist"),
        ({}, {"split": "val"}, r"val.txt does not exist; give split=… of test"),
        ({}, {"size": 60}, "size=60 is not a multiple of the patch 16"),
        ({}, {"layer": 3}, "layer 3, but the encoder has 2 blocks"),
    ],
)
def test_what_does_not_fit_is_said_before_any_work(
    tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    data = write_spair(tmp_path / "spair", **changes)
    with pytest.raises(UserError, match=rf"correspondence: .*{said}"):
        results_of("correspondence", tiny_recipe(tmp_path, "mae"), data, **settings)
