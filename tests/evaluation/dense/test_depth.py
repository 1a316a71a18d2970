"""Depth: golden numbers of head, loss and metrics; data set layouts; one run on scenes."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.rendering import draw_scene
from pospre.errors import UserError
from pospre.evaluation.dense.depth.depth import check
from pospre.evaluation.dense.depth.depth_data import DepthSet, open_depths
from pospre.evaluation.dense.depth.depth_head import (
    METRICS,
    DepthHead,
    ShareHead,
    depth_metrics,
    expected_depth,
    sig_loss,
    silog_loss,
)
from pospre.evaluation.dense.depth.protocols import (
    EIGEN,
    PROTOCOLS,
    DepthCrops,
    depths_of,
    depths_to_measure,
)
from pospre.evaluation.dense.settings import Depth
from pospre.evaluation.registry import Plan
from tests.conftest import jpeg
from tests.evaluation.checkpoints import results_of, tiny_recipe
from tests.evaluation.dense.pictures import rendered_splits

BINS = torch.linspace(0.001, 10, 256)


def test_bins_give_the_published_depths() -> None:
    for place, level, depth in ((0, -3.0, 5.0005), (0, 100.0, 1.020006), (255, 100.0, 8.980994)):
        logits = torch.zeros(1, 256, 1, 1)
        logits[0, place] = level
        assert float(expected_depth(logits, BINS)) == pytest.approx(depth, abs=1e-5)
    low, high = torch.zeros(1, 256, 1, 1), torch.zeros(1, 256, 1, 1)
    low[0, 0], high[0, 255] = 50, 150
    between = float(expected_depth((low + high) / 2, BINS))  # of mixed logits, not mixed depths
    mean = float((expected_depth(low, BINS) + expected_depth(high, BINS)) / 2)
    assert (between, mean) == pytest.approx((6.990747, 5.482548), abs=1e-5)
    share = ShareHead(8, 10.0)
    half = 10 * float(share.project.state_dict()["bias"].sigmoid())
    for head, depth in (
        (DepthHead(8, 10.0), 5.0005),
        (DepthHead(8, 10.0, normed=False, enlarged=4), 5.0005),
        (share, half),
    ):
        found = head.eval()(torch.zeros(2, 8, 3, 4), (6, 8))
        assert found.shape == (2, 1, 6, 8) and torch.allclose(found, torch.tensor(depth))


def test_loss_and_metrics_are_the_golden_numbers() -> None:
    predicted, truth = torch.tensor([1.1, 1.8, 5]), torch.tensor([1.0, 2, 4])
    assert float(sig_loss(predicted, truth)) == pytest.approx(0.167802, abs=1e-6)
    assert float(sig_loss(predicted, truth, warm=True)) == pytest.approx(0.027499, abs=1e-6)
    assert float(silog_loss(predicted, truth)) == pytest.approx(0.144234, abs=1e-6)
    first = depth_metrics(predicted, truth)
    golden = (0.591608, 0.15, 0.666667, 0.061353, 13.520561)  # 5 for 4 is not within a factor 1.25
    assert first.tolist() == pytest.approx(golden, abs=1e-5)
    second = depth_metrics(torch.tensor([2.0]), torch.tensor([4.0]))
    assert second.tolist()[:4] == pytest.approx((2, 0.5, 0, 0.301030), abs=1e-6)
    mean = torch.stack([first, second]).mean(0)  # over images, not pixels
    assert mean.tolist()[:3] == pytest.approx((1.295804, 0.325, 0.333333), abs=1e-6)
    four = torch.tensor([1.0, 2, 4, 8])
    assert float(depth_metrics(torch.full((4,), 3.75), four)[0]) == pytest.approx(
        2.680951, abs=1e-6
    )
    constant = four.log().mean().exp().expand(4)
    assert float(constant[0]) == pytest.approx(2.828427, abs=1e-6)
    assert float(depth_metrics(constant, four)[1]) == pytest.approx(0.795495, abs=1e-6)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return scenes with a training and a validation folder."""
    return rendered_splits(tmp_path_factory.mktemp("scenes"), {"train": 12, "val": 6}, frames=1)


def test_depths_of_scenes_are_the_renderers(scenes: Path) -> None:
    data = open_depths(str(scenes), "val", 1000.0)
    for index, line in enumerate(data.truths):
        depth = data.depth(index, 16.0)
        scene = draw_scene(0, line["scene"], "val")
        assert float(depth[0].max()) in (0.0, *(item["distance"] for item in line["objects"]))
        row = 63
        ground = 1 / (63.5 / 64 - scene.horizon)
        near = {item["distance"] for item in line["objects"]}
        ours = [float(each) for each in depth[row] if round(float(each), 4) not in near]
        assert ours == pytest.approx([min(ground, 16.0)] * len(ours), rel=1e-3)
        assert 0 < float(depth.max()) <= 16


def test_a_head_is_trained_on_scenes(scenes: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "mae")
    found = results_of("depth", recipe, scenes, iterations=40, lr=0.003)
    assert (found["train_images"], found["images"], found["max_depth"]) == (12, 6, 16)
    assert found["rmse"] < found["constant_rmse"] and 0 < found["delta1"] <= 1
    assert found["rmse_difference"] == pytest.approx(found["rmse"] - found["initial_rmse"])
    assert {f"constant_{name}" for name in METRICS} <= {*found}
    again = results_of("depth", recipe, scenes, iterations=40, lr=0.003, baseline=False)
    assert again["rmse"] == found["rmse"] and again["initial_rmse"] is None


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [("dinov3", {}), ("dinov2", {"layers": "1,2"}), ("pixio", {"batch_size": 6})],
)
def test_published_protocols_train_on_crops(
    scenes: Path, tmp_path: Path, protocol: str, settings: dict[str, Any]
) -> None:
    recipe = tiny_recipe(tmp_path, "mae", patch_size=14, image_size=56)
    given = {"crop": "42,50", "iterations": 4, "baseline": False, "half": "judge", **settings}
    found = results_of("depth", recipe, scenes, protocol=protocol, **given)
    assert found["protocol"] == protocol and found["view"] == [42, 50]
    assert found["images"] < 6 and 0 < found["rmse"] < 16
    assert results_of("depth", recipe, scenes, protocol=protocol, **given) == found


def test_crops_and_their_depths_stay_together(tmp_path: Path) -> None:
    data = write_pairs(tmp_path, "npy", levels=True)
    train = open_depths(str(data), "train", 1000.0)
    plain = DepthCrops(train, 9.0, (40, 50), 0, augment=False)
    levels, depth = plain[0, 0]
    known = depth > 0
    assert levels.shape == (3, 40, 50) and depth.shape == (40, 50) and known.any()
    assert torch.equal(levels[0][known], 50 * depth[known])  # as the image was written
    augmented = DepthCrops(train, 9.0, (40, 50), 0, augment=True)
    drawn = [augmented[epoch, 0] for epoch in range(12)]
    assert torch.equal(drawn[3][0], augmented[3, 0][0])
    assert len({float(each.sum()) for each, _ in drawn}) == len(drawn)
    assert {float(value) for _, each in drawn for value in each.unique()} <= {0, 1, 3}
    colours = {float(each[0].max()) for each, _ in drawn}
    assert 150.0 in colours and len(colours) > 2  # a part is not coloured


def test_nyu_is_measured_in_eigens_box(tmp_path: Path) -> None:
    root = write_pairs(tmp_path / "data", "nyu", sides=(480, 640))
    recipe = tiny_recipe(tmp_path, "mae")
    setup = check(Plan("depth", recipe, str(root), Depth(protocol="pixio"), None))
    assert [truth.numel() for truth in setup.truths] == [238_560] * 2
    assert setup.fit.iterations == 60  # one step an epoch
    levels, _ = DepthCrops(setup.train, 9.0, (426, 560), 0, augment=False)[0, 0]
    box = setup.train.image(0)[:, 45:471, 41:601].float()
    assert any(torch.equal(levels, each) for each in (box, box.flip(-1)))


class Columns(torch.nn.Module):
    """Maps that are the images, and a head that gives each pixel's column and first level."""

    def __init__(self) -> None:
        super().__init__()
        encoder = SimpleNamespace(patch_size=(14, 14))
        self.model = SimpleNamespace(encoder=encoder)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, images: torch.Tensor, size: Any = None) -> Any:
        if size is None:
            return [images]
        self.shapes.append(tuple(images.shape[-2:]))
        assert size == images.shape[-2:] and not images[:, :, :5].any()
        return images[:, :1] + torch.arange(size[1])


def test_images_are_padded_around_their_middle_and_mirrored() -> None:
    maps: Any = Columns()
    image = torch.rand(1, 3, 480, 640)
    found = depths_of(maps, maps, image)
    assert maps.shapes == [(490, 644)]
    assert torch.equal(found, image[:, :1] + torch.arange(2, 642))
    both = depths_to_measure(PROTOCOLS["dinov3"], maps, maps, image, EIGEN, (416, 544))
    assert both.shape == (426, 560)
    assert torch.allclose(both, (image[0, 0] + 321.5)[EIGEN], atol=1e-4)


@pytest.mark.parametrize("kind", ["png", "npy"])
def test_depths_are_read_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    recorded = DepthSet._recorded

    def counted(self: DepthSet, index: int) -> Any:
        read.append(index)
        return recorded(self, index)

    monkeypatch.setattr(DepthSet, "_recorded", counted)
    data = write_pairs(tmp_path / "data", kind)
    found = results_of("depth", tiny_recipe(tmp_path, "mae"), data, iterations=4)
    assert found["max_depth"] == 3 and read == [0, 1, 0, 1]  # two of each split


def write_pairs(
    root: Path, kind: str, sides: tuple[int, int] = (60, 80), *, levels: bool = False
) -> Path:
    """Write two images a split with depths of 1 and 3 m, and a pixel without.

    With ``levels`` an image's grey levels are 50 a metre.
    """
    values = np.full(sides, 3.0)
    values[: sides[0] // 2], values[0, 0] = 1, 0
    for split in ("train", "val"):
        folder = root if kind == "nyu" else root / split
        for name in ("images", "depth"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            stem = f"{split}{number}"
            if levels:
                grey = Image.fromarray((50 * values).astype(np.uint8))
                grey.save(folder / "images" / f"{stem}.png")
            else:
                (folder / "images" / f"{stem}.jpg").write_bytes(jpeg(number, *sides[::-1]))
            if kind == "npy":
                np.save(folder / "depth" / f"{stem}.npy", np.where(values == 0, np.nan, values))
            else:
                picture = Image.fromarray((values * 1000).astype(np.uint16))
                picture.save(folder / "depth" / f"{stem}.png")
        if kind == "nyu":
            name = "test" if split == "val" else split
            rows = (f"/images/{split}{n}.jpg depth/{split}{n}.png 518.8\n" for n in range(2))
            (root / f"nyu_{name}.txt").write_text("".join(rows) + "images/x.jpg None 518.8\n")
    return root


def sparse(path: Path) -> None:
    """Leave a few depths of an image, in a corner."""
    depths = np.array(Image.open(path))
    depths[:5], depths[7:], depths[:, 8:] = 0, 0, 0
    Image.fromarray(depths).save(path)


@pytest.mark.parametrize("protocol", ["dinov3", "pixio"])
def test_crops_beside_sparse_depths_teach_nothing(tmp_path: Path, protocol: str) -> None:
    data = write_pairs(tmp_path / "data", "png")
    for path in (data / "train" / "depth").iterdir():
        sparse(path)
    few: dict[str, Any] = {"crop": "32,32", "iterations": 6, "batch_size": 1, "max_depth": 4.0}
    found = results_of(
        "depth", tiny_recipe(tmp_path, "mae"), data, protocol=protocol, baseline=False, **few
    )
    assert math.isfinite(found["loss"]) and found["rmse"] > 0


@pytest.mark.parametrize("kind", ["png", "npy", "nyu"])
def test_layouts_hold_the_same_depths(tmp_path: Path, kind: str) -> None:
    data = open_depths(str(write_pairs(tmp_path, kind)), "val", 1000.0)
    assert len(data) == 2
    depth = data.depth(0, 10.0)
    assert (float(depth[0, 0]), float(depth[5, 5]), float(depth[50, 5])) == (0, 1, 3)
    assert float(data.depth(0, 2.0).max()) == 1  # deeper pixels are no truth


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (lambda root: None, {"split": "test"}, "has no split 'test' with depths"),
        (lambda root: None, {"size": 60}, "size=60 is not a multiple of the patch 16"),
        (lambda root: None, {"crop": "32,32"}, "crop=… does not belong to protocol=look"),
        (
            lambda root: None,
            {"protocol": "dinov3", "size": 64},
            "size=… does not belong to protocol=dinov3; use crop",
        ),
        (lambda root: None, {"protocol": "pixio"}, "60×80 pixels, less than crops of 256×256"),
        (lambda root: None, {"layers": "3"}, "layer 3, but the encoder has 2 blocks"),
        (lambda root: {"class_token": False}, {"protocol": "pixio", "crop": "32,32"},
         "reads the class token, which this encoder does not"),
        (lambda root: {"positions": "relative"}, {"protocol": "dinov3", "crop": "32,32"},
         "positions = relative supports only one; use look"),
        (lambda root: None, {"split": "train"}, "would be measured on training images"),
        (lambda root: None, {"max_depth": 0.5}, "has no depth between 0 and max_depth=0.5 m"),
        (lambda root: None, {"scale": 256_000}, r"largest depth is 0\.0117188 m: .*scale=256000"),
        (lambda root: None, {"scale": 1}, "largest depth is 3000 m: .*or max_depth=3000 if it is"),
        (lambda root: sparse(root / "train/depth/train0.png"), {"size": 16},
         "train0.jpg has hardly a depth left at 16×16 pixels; leave it out, or give a larger size"),
        (lambda root: (root / "val/depth/val0.png").unlink(), {}, "1 are alone, such as val0"),
        (lambda root: np.save(root / "val/depth/val0.npy", np.ones((20, 30))), {},
         r"depth has both val0\.npy and val0\.png; images and labels belong together by their na"),
        (lambda root: (root / "val/depth/val0.png").write_bytes(jpeg(0, 80, 60)), {},
         "val0.png has 3 channels"),
        (lambda root: Image.new("I;16", (8, 8), 9).save(root / "val/depth/val0.png"), {},
         "has 8×8 depths, but its image has 60×80 pixels"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_any_work(
    tmp_path: Path, change: Callable[[Path], Any], settings: dict[str, Any], said: str
) -> None:
    """``change`` is made to the data, or gives options of the encoder."""
    data = write_pairs(tmp_path / "data", "png")
    changed = change(data)
    encoder = changed if isinstance(changed, dict) else {}
    with pytest.raises(UserError, match=rf"depth: .*{said}"):
        results_of("depth", tiny_recipe(tmp_path, "mae", **encoder), data, **settings)
