"""What is said of settings and of what cannot be measured or drawn, before any work."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pospre.evaluation.registry import check_settings
from pospre.evaluation.run import check_evaluation
from pospre.nn.swin.encoder import SWIN_NEEDS
from tests.conftest import write_images
from tests.evaluation.analysis.small import IJEPA, MAE, small_recipe
from tests.refusals import refuses

SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    (r"unknown evaluation 'knnn'. Did you mean 'knn'\?", "knnn", {}),
    ("unknown evaluation 'registry'", "registry", {}),
    ("unknown evaluation", "../knn", {}),
    ("logistic needs the setting bank: text. Data set to fit the class", "logistic", {}),
    ("no setting 'kk'. Did you mean 'k'", "knn", {"kk": "3"}),
    ("no setting 'context'", "knn", {"context": "3"}),
    ("no setting 'sampling'", "knn", {"sampling": "3"}),
    ("knn: k=many: .*integer", "knn", {"k": "many"}),
    ("knn: k=2.5: .*integer", "knn", {"k": 2.5}),
    ("segmentation: lr=1e300: .* below 1e", "segmentation", {"lr": "1e300"}),
    ("knn: k=True: .*integer", "knn", {"k": True}),
    ("knn: k=0: .*greater than 0", "knn", {"k": "0"}),
    ("knn: k=null: .*integer", "knn", {"k": "null"}),
    ("knn: layers=last", "knn", {"layers": "last"}),
    ("features=max: .*'mean', 'cls' or 'prefix'", "knn", {"features": "max"}),
    ("needs the setting protocol: mae.*clevr_distance", "linear", {"bank": "photos"}),
    ("protocol=moco", "linear", {"bank": "photos", "protocol": "moco"}),
    ("patch_position: mask_ratios=", "patch_position", {"mask_ratios": "0,1"}),
    ("patch_position: mask_ratios=", "patch_position", {"mask_ratios": "high"}),
    ("patch_position: mask_ratios=", "patch_position", {"mask_ratios": []}),
    ("baseline=perhaps: .*boolean", "position_grid", {"baseline": "perhaps"}),
    ("mask_ratio=1: .*less than 1", "position_pictures", {"mask_ratio": "1"}),
    ("layers=0,x", "position_probe", {"layers": "0,x"}),
    ("greater than or equal to 0", "position_probe", {"layers": "-1"}),
    ("grids=7xx", "position_probe", {"grids": "7xx"}),
    ("greater than 0", "position_probe", {"grids": "0"}),
    ("greater than or equal to 8", "position_probe", {"num_samples": "7"}),
]


@pytest.mark.parametrize(("words", "name", "settings"), SETTINGS)
def test_wrong_settings_are_named(words: str, name: str, settings: dict[str, Any]) -> None:
    refuses(words, lambda: check_settings(name, settings))


CLASSES, FIVE = ({"supervised": {"num_classes": number}} for number in (2, 5))
STOP = {"ijepa": IJEPA, "stop": {}}
FIXED = {"ijepa": IJEPA, "stop": {"variant": "sincos"}}
DROPPOS: dict[str, Any] = {"droppos": {}}
BIASES = {"positions": "relative"}
SINCOS = {"positions": "sincos"}
BLANK: dict[str, Any] = {"by": "blank"}
SWIN = {"name": "swin_tiny", "image_size": 64, **SWIN_NEEDS}
TABLES = "; it supports sincos, learned"
NOTHING = "nothing to disturb; with encoder.positions = sincos give shifts or zooms or scales"
NONE: dict[str, Any] = {"shifts": [], "zooms": [], "scales": []}
VISSL, OF_MAE = ({"bank": "DATA", "protocol": name} for name in ("vissl", "mae"))

ROWS: list[tuple[str, str, Any, Any, Any]] = [
    # words; evaluation, algorithms, encoder and settings
    ("layer 3, but the encoder has 2 blocks", "attention", MAE, {}, {"layers": [1, 3]}),
    ("the first attention is layer 1", "attention", MAE, {}, {"layers": "0,1"}),
    ("patch 16, but there are 4 × 4 patches", "attention", MAE, {}, {"queries": "3,16"}),
    ("60 is not divisible by the patch size 8", "attention", MAE, {}, {"image_size": 60}),
    ("=64, but encoder.positions = relative s", "attention", MAE, BIASES, {"image_size": 64}),
    ("the first attention is layer 1", "relative_attention", MAE, {}, {"layers": "0,1"}),
    ("is not divisible by the patch size 8", "relative_attention", MAE, {}, {"image_size": 60}),
    ("compares the patches of an image, and this encoder sees only one", "drift", MAE,
     {"image_size": 8}, {}),
    ("no class token", "duplicates", MAE, {"class_token": False}, {"features": "cls"}),
    ("it needs 2 images or more", "duplicates", MAE, {}, {"num_samples": 1}),
    (f"encoder.positions is none{TABLES}", "field", MAE, {"positions": "none"}, {}),
    (f"encoder.positions is relative{TABLES}", "field", MAE, BIASES, {}),
    ("the encoder has 2 blocks", "grad_cam", CLASSES, {}, {"layer": 3}),
    ("grad_cam: .* has 2 classes, but the head has 5", "grad_cam", FIVE, {}, {"target": "label"}),
    ("algorithms.supervised trains, but this recipe has mae", "grad_cam", MAE, {}, {}),
    ("protocol=vissl uses the last 4 blocks, but the encoder has 2", "linear", MAE, {}, VISSL),
    ("gives 4 images of 2 classes", "linear", MAE, {}, {**OF_MAE, "label_fraction": 0.5}),
    ("labels=none.txt cannot be read", "linear", MAE, {}, {**OF_MAE, "labels": "none.txt"}),
    ("both choose", "linear", MAE, {}, {**OF_MAE, "labels": "x", "label_fraction": 0.5}),
    ("no class token", "linear", MAE, {"class_token": False}, OF_MAE),
    ("layer 3, but the encoder has 2 blocks", "position_correlation", MAE, {}, {"layer": 3}),
    ("it needs 2 images or more", "position_correlation", MAE, {}, {"num_samples": 1}),
    ("layer 3, but the encoder has 2 blocks", "position_probe", MAE, {}, {"layers": [3]}),
    ("nowhere", "position_probe", MAE, {}, {"versus": "nowhere"}),
    ("unknown evaluation 'knnn'", "position_removal", MAE, {}, {"evaluations": "knnn"}),
    ("has no figures to compare", "position_removal", MAE, {},
     {"evaluations": "position_pictures"}),
    ("evaluations=logistic: logistic needs the setting bank", "position_removal", MAE, {},
     {"evaluations": "logistic"}),
    ("evaluations=knn: knn: k=20, but only 8 images can vote", "position_removal", MAE, {},
     {"evaluations": "knn"}),
    ("evaluations=attention has no fig.* give some of .*knn", "position_removal", MAE, {},
     {"evaluations": "attention"}),
    ("planes=16, but by=regression", "position_removal", MAE, {}, {"planes": "16"}),
    ("blank=mean needs by=blank", "position_removal", MAE, {}, {"blank": "mean"}),
    ("planes=15, but at most 14 ", "position_removal", MAE, SINCOS, {"planes": 15, **BLANK}),
    ("positions = none: a blank image is empty", "position_removal", MAE, {"positions": "none"},
     BLANK),
    *((f"{kind} only relates tokens .* no class token or registers", "position_removal", MAE,
       {"positions": kind, "class_token": False}, BLANK)
      for kind in ("rotary", "alibi", "relative")),
    ("planes=17, but at most 16 ", "position_removal", MAE, {**SINCOS, "image_size": 64},
     {"planes": 17, **BLANK}),
    ("by=covariance removes one plane", "position_removal", MAE, {},
     {"planes": "2", "by": "covariance"}),
    (r"algorithms\.mae or .*simmim.*has droppos", "reconstructions", DROPPOS, {}, {}),
    ("mask_ratio=0: .*greater than 0", "reconstructions", MAE, {}, {"mask_ratio": 0}),
    ("reads the blocks of a ViT", "segmentation", DROPPOS, SWIN, {}),
    ("takes RGB images and square patches; this encoder has 1 channels", "segmentation", DROPPOS,
     {"channels": 1}, {}),
    ("and patches of 8×4", "segmentation", DROPPOS, {"patch_size": (8, 4)}, {}),
    ("positions = relative give shifts", "shifted_positions", MAE, BIASES, {"shifts": []}),
    ("positions = none give scales or mosaics", "shifted_positions", MAE, {"positions": "none"},
     {"scales": []}),
    (NOTHING, "shifted_positions", MAE, SINCOS, NONE),
    ("no class token", "shifted_positions", MAE, {"class_token": False}, {"features": "cls"}),
    ("no class token and no registers", "shifted_positions", MAE, {"class_token": False},
     {"features": "prefix"}),
    ("mosaics=2 shows 4 images at once and k=6 others vote", "shifted_positions", MAE, SINCOS,
     {"k": 6, "mosaics": (2,)}),
    ("features=cls, but a picture of mosaics", "shifted_positions", MAE, SINCOS,
     {"k": 2, "mosaics": (2,), "features": "cls"}),
    ("shifts=9 wraps around the grid", "shifted_positions", MAE, SINCOS, {"shifts": "9"}),
    ("k=20, but only 8 images can vote; use k=8", "shifted_positions", MAE, SINCOS, {}),
    ("layer 3, but the encoder has 2 blocks", "spectrum", MAE, {}, {"layers": [0, 3]}),
    ("no class token", "spectrum", MAE, {"class_token": False}, {"features": "cls"}),
    ("adds no noise to positions", "stop_similarity", FIXED, {}, {}),
    ("4 × 4 patches", "stop_similarity", STOP, {}, {"queries": [16]}),
    ("algorithms.stop trains, but .* has ijepa", "stop_similarity", {"ijepa": IJEPA}, {}, {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("nine"), 9, ("cat", "dog"))


@pytest.mark.parametrize(("words", "name", "algorithms", "encoder", "settings"), ROWS)
def test_what_is_not_there_is_said_before(
    words: str, name: str, algorithms: Any, encoder: Any, settings: Any, data: Path
) -> None:
    recipe = small_recipe(algorithms, **encoder)
    given = {key: str(data) if value == "DATA" else value for key, value in settings.items()}
    refuses(words, lambda: check_evaluation(name, recipe, data, given, None), data)


def test_one_image_is_too_few_and_pictures_need_a_folder(data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    images = {"one": write_images(tmp_path / "one", 1), "out": data}
    for words, name, output in (
        ("it needs 2 images or more", "one", None),
        ("which is a file", "out", tmp_path / "out.json"),
    ):
        call = partial(check_evaluation, "spectrum", small_recipe(), images[name], {}, output)
        refuses(words, call, tmp_path)
