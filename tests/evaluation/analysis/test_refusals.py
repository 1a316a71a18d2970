"""Analyses refuse what they cannot measure or draw before any work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.evaluation.run import check_evaluation
from tests.evaluation.analysis.small import IJEPA, MAE, small_recipe

CLASSES = {"supervised": {"num_classes": 2}}
STOP = {"ijepa": IJEPA, "stop": {}}
FIXED = {"ijepa": IJEPA, "stop": {"variant": "sincos"}}
RELATIVE = {"positions": "relative"}
TABLES = "; it supports sincos, learned"


@pytest.mark.parametrize(
    ("name", "algorithms", "encoder", "settings", "said"),
    [
        ("attention", MAE, {}, {"layers": [1, 3]}, "layer 3, but the encoder has 2 blocks"),
        ("attention", MAE, {}, {"layers": "0,1"}, "the first attention is layer 1"),
        ("attention", MAE, {}, {"queries": "3,16"}, "patch 16, but there are 4 × 4 patches"),
        ("attention", MAE, {}, {"image_size": 60}, "60 is not divisible by the patch size 8"),
        ("attention", MAE, RELATIVE, {"image_size": 64}, "=64, but encoder.positions = relative s"),
        ("relative_attention", MAE, {}, {"layers": "0,1"}, "the first attention is layer 1"),
        ("relative_attention", MAE, {}, {"image_size": 60}, "is not divisible by the patch size 8"),
        ("field", MAE, {"positions": "none"}, {}, f"encoder.positions is none{TABLES}"),
        ("field", MAE, RELATIVE, {}, f"encoder.positions is relative{TABLES}"),
        ("grad_cam", CLASSES, {}, {"layer": 3}, "the encoder has 2 blocks"),
        (
            "grad_cam",
            {"supervised": {"num_classes": 5}},
            {},
            {"target": "label"},
            "grad_cam: .* has 2 classes, but the head has 5",
        ),
        ("grad_cam", MAE, {}, {}, "algorithms.supervised trains, but this recipe has mae"),
        ("position_correlation", MAE, {}, {"layer": 3}, "layer 3, but the encoder has 2 blocks"),
        ("position_correlation", MAE, {}, {"num_samples": 1}, "it needs 2 images or more"),
        ("reconstructions", {"droppos": {}}, {}, {}, r"algorithms\.mae or .*simmim.*has droppos"),
        ("reconstructions", MAE, {}, {"mask_ratio": 0}, "mask_ratio=0: .*greater than 0"),
        ("spectrum", MAE, {}, {"layers": [0, 3]}, "layer 3, but the encoder has 2 blocks"),
        ("spectrum", MAE, {"class_token": False}, {"features": "cls"}, "no class token"),
        ("stop_similarity", FIXED, {}, {}, "adds no noise to positions"),
        ("stop_similarity", STOP, {}, {"queries": [16]}, "4 × 4 patches"),
        ("stop_similarity", {"ijepa": IJEPA}, {}, {}, "algorithms.stop trains, but .* has ijepa"),
    ],
)
def test_what_is_not_there_is_said_before(
    image_folder: Callable[..., Path],
    name: str,
    algorithms: dict[str, Any],
    encoder: dict[str, Any],
    settings: dict[str, Any],
    said: str,
) -> None:
    recipe = small_recipe(algorithms, **encoder)
    with pytest.raises(UserError, match=said):
        check_evaluation(name, recipe, image_folder(2), settings, None)


def test_one_image_is_too_few(image_folder: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="it needs 2 images or more"):
        check_evaluation("spectrum", small_recipe(), image_folder(1), {}, None)


def test_a_file_where_the_pictures_go(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="which is a file"):
        check_evaluation("attention", small_recipe(), image_folder(2), {}, tmp_path / "out.json")
