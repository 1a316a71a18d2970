"""Detection: its figures against torchmetrics, its data, its network, a whole evaluation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import FasterRCNN, MaskRCNN

from data_prep.scenes import Settings, render_scenes
from pospre.data.decode.bit_depth import RGB
from pospre.errors import UserError
from pospre.evaluation.dense.detection import detection
from pospre.evaluation.dense.detection.average_precision import average_precision
from pospre.evaluation.dense.detection.box_data import open_boxes
from pospre.evaluation.dense.detection.box_set import BoxSet
from pospre.evaluation.dense.detection.detection import Jittered
from pospre.evaluation.dense.detection.mask_rcnn import Pyramid, build_detector, stride_of
from pospre.evaluation.dense.maps import FeatureMaps
from pospre.evaluation.estimates import with_differences
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.evaluation.dense.pictures import COLOURS, coco_folder, rectangles, voc_folder

Run = Callable[..., dict[str, Any]]
SMALL = {"size": 64, "channels": 16, "regions": 16, "batch_size": 2}


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return voc_folder(tmp_path_factory.mktemp("voc"), {"train": 8, "val": 4})


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> BoxSet:
    folder = coco_folder(tmp_path_factory.mktemp("coco"), {"train": 2, "val": 12})
    return open_boxes(str(folder), "val")


# -- figures --------------------------------------------------------------------------------------


def noisy(boxes: BoxSet, seed: int) -> list[dict[str, Any]]:
    """Return detections that are near the truth, some of a wrong class, and a few of nothing."""
    generator, found = np.random.default_rng(seed), []
    for number, items in enumerate(boxes.items, start=1):
        for item in items:
            x0, y0, x1, y1 = np.array(item.box) + generator.normal(0, 2.0, 4)
            label = item.label if generator.random() < 0.8 else 3 - item.label
            line = {"image_id": number, "category_id": label, "score": float(generator.random())}
            found.append({**line, "bbox": [x0, y0, x1 - x0, y1 - y0], "segmentation": item.mask})
    return found


def precision_of(*given: Any) -> dict[str, Any]:
    """Return all figures of ``average_precision`` by name."""
    figures, others = average_precision(*given)
    return {**with_differences({"": figures}), **others}


def test_figures_are_those_of_torchmetrics(coco: BoxSet):
    detections = noisy(coco, 0)
    theirs = MeanAveragePrecision(class_metrics=True, backend="pycocotools")
    for number, items in enumerate(coco.items, start=1):
        mine = [line for line in detections if line["image_id"] == number]
        corners = torch.tensor([line["bbox"] for line in mine], dtype=torch.float64)
        corners[:, 2:] += corners[:, :2]
        found = {
            "boxes": corners,
            "scores": torch.tensor([line["score"] for line in mine]),
            "labels": torch.tensor([line["category_id"] for line in mine]),
        }
        wanted = {
            "boxes": torch.tensor([item.box for item in items]),
            "labels": torch.tensor([item.label for item in items]),
        }
        theirs.update([found], [wanted])
    ours, wanted = precision_of(coco.coco(), detections), theirs.compute()
    for name, key in {"AP": "map", "AP50": "map_50", "AP75": "map_75"}.items():
        assert ours[name] == pytest.approx(float(wanted[key]), abs=1e-6)
    assert 0.1 < ours["AP"] < ours["AP50"] < 1
    assert list(ours["classes"].values()) == pytest.approx(wanted["map_per_class"].tolist())
    assert ours["AP_large"] is None  # no rectangle has 96² pixels
    assert 0 < ours["AP_se"] < 0.2


def test_size_of_a_mask_is_its_own_area():
    """Diagonal stripes: small objects in boxes of medium size."""
    truth, found = BoxSet("stripes", ["stripe"], RGB), []
    theirs = MeanAveragePrecision(iou_type="segm", backend="pycocotools")
    for number, score in enumerate((0.9, 0.4, 0.7), start=1):
        places = np.arange(40 + 10 * number)
        stripe = np.zeros((100, 100), np.uint8)
        for shift in range(6):
            stripe[places, places + shift] = 1
        moved = np.roll(stripe, number - 1, axis=1)
        masks = [coco_mask.encode(np.asfortranarray(each)) for each in (stripe, moved)]
        truth.images.append(Path("stripe"))
        truth.sides.append((100, 100))
        truth.items.append([])
        truth.add([0.0, 0.0, places[-1] + 6.0, places[-1] + 1.0], 1, mask=masks[0])
        line = {"image_id": number, "category_id": 1, "score": score, "segmentation": masks[1]}
        found.append({**line, "bbox": [0.0, 0.0, 60.0, 60.0]})
        both = [
            {"masks": torch.from_numpy(each).bool()[None], "labels": torch.tensor([1])}
            for each in (stripe, moved)
        ]
        theirs.update([both[1] | {"scores": torch.tensor([score])}], [both[0]])
    ours, wanted = precision_of(truth.coco(), found, "segm"), theirs.compute()
    assert [ours["AP"], ours["AP_small"]] == pytest.approx([float(wanted["map"])] * 2, abs=1e-6)
    assert wanted["map_small"] == wanted["map"] and 0 < ours["AP"] < 1
    assert ours["AP_medium"] is ours["AP_large"] is None


def test_standard_errors_leave_out_every_tenth_image(coco: BoxSet):
    detections, truth = noisy(coco, 1), coco.coco()
    without = []
    for group in range(10):
        kept = [number for number in range(1, 13) if (number - 1) % 10 != group]
        rest = {
            **truth,
            "images": [each for each in truth["images"] if each["id"] in kept],
            "annotations": [each for each in truth["annotations"] if each["image_id"] in kept],
        }
        lines = [line for line in detections if line["image_id"] in kept]
        without.append(precision_of(rest, lines)["AP50"])
    wanted = np.sqrt(9 / 10 * ((np.array(without) - np.mean(without)) ** 2).sum())
    assert precision_of(truth, detections)["AP50_se"] == pytest.approx(wanted, rel=1e-9)


def test_nothing_at_all_is_found(coco: BoxSet):
    nothing = precision_of(coco.coco(), [])
    assert (nothing["AP"], nothing["AP50_se"]) == (0.0, 0.0)


# -- data -----------------------------------------------------------------------------------------


def test_coco_voc_and_scenes_are_read(coco: BoxSet, voc: Path, tmp_path: Path):
    assert list(coco.classes) == ["red", "green"]  # by their ids, 3 and 7
    pascal = open_boxes(str(voc), "val")
    assert list(pascal.classes) == ["green", "red"]
    for index in range(4):
        wanted = [tuple(map(float, each[:4])) for each in rectangles(100 + index, 64, 64)]
        assert [item.box for item in coco.items[index]] == wanted
        assert [item.box for item in pascal.items[index]] == wanted
        for item in coco.items[index]:
            assert item.read_mask().sum() == item.area
    assert coco.has_masks and not pascal.has_masks
    settings = Settings(num_images=3, size=48, seed=0, split="val", frames=1)
    render_scenes(tmp_path / "scenes", settings, num_workers=1)
    scenes = open_boxes(str(tmp_path / "scenes"), "val")
    lines = (tmp_path / "scenes" / "labels.jsonl").read_text().splitlines()
    first = json.loads(lines[0])["objects"]
    assert [item.box for item in scenes.items[0]] == [tuple(map(float, o["box"])) for o in first]
    assert [item.read_mask().sum() for item in scenes.items[0]] == [o["area"] for o in first]


def test_jittered_squares_keep_boxes_masks_and_pixels_together(coco: BoxSet):
    samples = Jittered(coco, 48, (0.6, 1.5), (0, 0, 0), seed=1, has_masks=True)
    seen = 0
    for index in range(6):
        image, target = samples[0, index]
        assert image.shape == (3, 48, 48) and image.dtype == torch.uint8
        for box, label, mask in zip(
            *(target[k] for k in ("boxes", "labels", "masks")), strict=True
        ):
            x0, y0, x1, y1 = box.round().int().tolist()
            inside = image[:, y0 + 2 : y1 - 2, x0 + 2 : x1 - 2].flatten(1).float()
            if inside.shape[1] > 20:
                wanted = torch.from_numpy(COLOURS[int(label)]).float()
                assert float((inside.median(1).values - wanted).abs().max()) < 16
                assert float(mask[y0 + 1 : y1 - 1, x0 + 1 : x1 - 1].float().mean()) > 0.95
                seen += 1
    assert seen > 4
    assert torch.equal(samples[0, 0][0], samples[0, 0][0])
    assert not torch.equal(samples[0, 0][0], samples[1, 0][0])


# -- network --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("patch", "stride", "side"), [(8, 8, 64), (14, 16, 56)])
def test_levels_have_the_strides_that_torchvision_counts(patch: int, stride: int, side: int):
    encoder = build_encoder("vit_tiny16", image_size=2 * patch, patch_size=patch, depth=1)
    maps = FeatureMaps(PretrainModel(encoder, seed=0).eval(), (1,), norm=True)
    detector = build_detector(maps, 2, size=64, channels=8, regions=4, has_masks=True)
    shown: list[tuple[int, ...]] = []
    encoder.register_forward_pre_hook(lambda _, args: shown.append(tuple(args[0].shape[-2:])))
    levels = detector.backbone(torch.zeros(1, 3, 64, 64))
    assert shown == [(side, side)] and stride_of(patch) == stride
    assert [64 // level.shape[-1] for level in levels.values()] == [
        stride // 4, stride // 2, stride, 2 * stride, 4 * stride,
    ]  # fmt: skip
    assert isinstance(detector, MaskRCNN)
    small = build_detector(maps, 2, size=32, channels=8, regions=4, has_masks=False)
    anchors = torch.cat(small.rpn.anchor_generator.cell_anchors)
    assert (anchors[:, 2:] > anchors[:, :2]).all()  # torchvision's of 1 pixel have no area
    boxes_alone = build_detector(maps, 2, size=64, channels=8, regions=4, has_masks=False)
    assert isinstance(boxes_alone, FasterRCNN) and not isinstance(boxes_alone, MaskRCNN)


@pytest.mark.parametrize("standardized", [True, False])
def test_a_frozen_encoder_is_not_judged_by_the_scale_of_its_features(
    dense_recipe: Recipe, standardized: bool
):
    """Else AP tells how much features vary beside their mean, not what lies in them."""
    model, images = build_model(dense_recipe), torch.rand(4, 3, 64, 64)
    levels = []
    for factor, shift in ((1.0, 0.0), (0.1, 2.0)):
        with torch.no_grad():
            norm = model.encoder.get_submodule("norm")
            norm.get_parameter("weight").mul_(factor)
            norm.get_parameter("bias").add_(shift)
        maps = FeatureMaps(model, (model.encoder.depth,), norm=True)
        torch.manual_seed(0)
        pyramid = Pyramid(maps, 8)
        if standardized:
            pyramid.standardize([images[:2], images[2:]])
        levels.append(pyramid(images)["1"])
    assert torch.allclose(levels[0], levels[1], atol=1e-3) == standardized


def test_what_is_found_is_in_pixels_of_the_image(
    dense_recipe: Recipe, coco: BoxSet, monkeypatch: pytest.MonkeyPatch
):
    """A detector that gives the truth in its own pixels, of twice the size, measures AP 1."""

    def perfect(images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        assert images[0].shape == (3, 128, 128)
        items = coco.items[len(calls)]
        calls.append(0)
        masks = torch.stack([torch.from_numpy(item.read_mask()) for item in items])
        return [
            {
                "boxes": 2 * torch.tensor([item.box for item in items]),
                "labels": torch.tensor([item.label for item in items]),
                "scores": torch.ones(len(items)),
                "masks": masks.float().repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None],
            }
        ]

    calls: list[int] = []
    setup = detection.Setup(coco, coco, 128)
    context = detection.Context(
        model=build_model(dense_recipe),
        initial=lambda: pytest.fail("not asked for"),
        data="",
        device=torch.device("cpu"),
        progress=False,
    )
    lines = detection._detect(context, setup, perfect)
    for kind in ("bbox", "segm"):
        assert precision_of(coco.coco(), lines, kind)["AP"] == 1.0


# -- a whole evaluation ---------------------------------------------------------------------------


@pytest.fixture
def standardize(monkeypatch: pytest.MonkeyPatch) -> Mock:
    mock = Mock(side_effect=Pyramid.standardize)
    monkeypatch.setattr(Pyramid, "standardize", lambda *given: mock(*given))
    return mock


def test_rectangles_are_found_by_a_frozen_encoder(measure: Run, voc: Path, standardize: Mock):
    settings = {**SMALL, "iterations": 60, "batch_size": 1, "lr": 0.004, "jitter": "1,1"}
    results = measure("detection", voc, **settings, baseline=False)
    assert results["AP50"] > 0.1  # 0.23 on one kind of CPU, 0.01 after two iterations
    assert results["mask_AP"] is None and results["initial_AP"] is None
    assert (results["images"], results["boxes"], results["train_images"]) == (4, 8, 8)
    standardize.assert_called_once()


def test_masks_are_learned_too_and_what_is_fine_tuned_is_a_copy(
    measure: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standardize: Mock
):
    data = coco_folder(tmp_path, {"train": 2, "val": 2})
    settings = {**SMALL, "iterations": 2, "finetune": True}
    read = Mock(wraps=open_boxes)
    monkeypatch.setattr(detection, "open_boxes", read)
    results = measure("detection", data, **settings)
    assert [call.args[1] for call in read.call_args_list] == ["train", "val"]  # once each
    assert results["mask_AP"] is not None
    assert results["initial_AP"] == results["AP"] and results["initial_loss"] == results["loss"]
    standardize.assert_not_called()


# -- bad input ------------------------------------------------------------------------------------


def change_first(folder: Path, change: dict[str, Any] | None) -> Path:
    """Change the first annotation of COCO's layout, or make it null; return the file."""
    path = folder / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    first = content["annotations"][0]
    content["annotations"][0] = None if change is None else first | change
    path.write_text(json.dumps(content))
    return path


def test_lists_and_marks_as_programs_write_them(voc: Path, tmp_path: Path):
    data = Path(shutil.copytree(voc, tmp_path / "voc"))
    listed, annotation = data / "ImageSets" / "Main" / "val.txt", data / "Annotations/val001.xml"
    # as Windows saves it, with blank lines and a name twice
    listed.write_bytes("val001 1\r\n  \r\n\r\nval000\r\nval001\r\n".encode("utf-16"))
    for written, ignored in (("True", True), ("1.0", True), ("", False), ("false", False)):
        whole = (voc / "Annotations/val001.xml").read_text()
        annotation.write_text(
            whole.replace("<bndbox>", f"<difficult>{written}</difficult><bndbox>"),
            encoding="utf-16",
        )
        found = open_boxes(str(data), "val")
        assert [path.name for path in found.images] == ["val001.jpg", "val000.jpg"]
        assert {item.crowd for item in found.items[0]} == {ignored}
    folder = coco_folder(tmp_path, {"val": 1})
    path = change_first(folder, {"iscrowd": "0", "segmentation": [10, 10, 18, 10, 10, 18]})
    plain = open_boxes(str(folder), "val")
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert open_boxes(str(folder), "val").items == plain.items
    assert not plain.items[0][0].crowd and plain.items[0][0].mask is not None


def test_run_lengths_beyond_the_image_are_refused(tmp_path: Path):
    long = {"segmentation": {"size": [64, 64], "counts": [0, 10**6]}}
    change_first(coco_folder(tmp_path, {"val": 1}), long)
    (item, _), *_ = open_boxes(str(tmp_path), "val").items
    with pytest.raises(UserError, match="run lengths of a mask do not fit its 64x64 pixels"):
        item.read_mask()


@pytest.mark.parametrize(
    ("noted", "area"), [({"area": 7.5}, 7.5), ({"area": None}, 32.0), ({"area": 0}, 32.0)]
)
def test_area_is_the_noted_one_or_that_of_the_mask(
    tmp_path: Path, noted: dict[str, Any], area: float
):
    triangle = {"bbox": [10, 10, 8, 8], "segmentation": [[10, 10, 18, 10, 10, 18]]}
    change_first(coco_folder(tmp_path, {"val": 1}), triangle | noted)
    (item, _), *_ = open_boxes(str(tmp_path), "val").items
    assert item.area == pytest.approx(area, abs=4)  # of a triangle's pixels
    assert "area" in noted and (noted["area"] or item.area == item.read_mask().sum())
    change_first(tmp_path, {"segmentation": None, "area": None})
    assert open_boxes(str(tmp_path), "val").items[0][0].area == 64
    change_first(tmp_path, {"area": -1})
    with pytest.raises(UserError, match="annotation 1 has the area -1; give a number of pixels"):
        open_boxes(str(tmp_path), "val")


def test_boxes_without_area_are_counted_and_other_classes_refused(tmp_path: Path):
    data = coco_folder(tmp_path, {"train": 1, "val": 1})
    path = change_first(data, {"bbox": [70, 2, 5, 5]})  # right of the image
    content = json.loads(path.read_text())
    content["categories"].append({"id": 9, "name": "blue"})
    path.write_text(json.dumps(content))
    found = open_boxes(str(data), "val")
    assert found.dropped == 1 and len(found.items[0]) == 1
    with pytest.raises(UserError, match=r"other classes than the training split .*'blue'"):
        open_boxes(str(data), "val", ["red", "green"])
    content["images"][0] |= {"height": 640, "width": 640}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"0\.jpg has height and width \(640, 640\), but upright"):
        open_boxes(str(data), "val")
    path.write_text("[]")
    with pytest.raises(UserError, match=r"instances_val2017\.json is not a COCO annotation file"):
        open_boxes(str(data), "val")
