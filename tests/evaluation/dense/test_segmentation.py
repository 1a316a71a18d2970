"""Segmentation: its measures against libraries, its decoders, a whole evaluation, bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, jaccard_score
from torchmetrics.classification import MulticlassJaccardIndex

from data_prep.scenes import Settings, render_scenes
from pospre.evaluation.dense.segmentation import segmentation
from pospre.evaluation.dense.segmentation.crops import Crops, Showing, predict
from pospre.evaluation.dense.segmentation.decoders import LinearDecoder
from pospre.evaluation.dense.segmentation.mask_data import IGNORED, check_masks, open_masks
from pospre.evaluation.estimates import with_differences
from pospre.evaluation.registry import UNTRAINED
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.evaluation.checkpoints import results_of
from tests.evaluation.dense.pictures import COLOURS, mask_folder, save

Run = Callable[..., dict[str, Any]]
QUICK = {"iterations": 25, "batch_size": 4, "lr": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mask_folder(tmp_path_factory.mktemp("masks"), {"train": 6, "val": 3})


# -- measures -------------------------------------------------------------------------------------


def drawn_confusions() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return predictions and truths (5, 400) of four classes, one of which is never there."""
    generator = np.random.default_rng(0)
    true = generator.integers(0, 3, (5, 400))
    predicted = np.where(generator.random((5, 400)) < 0.6, true, generator.integers(0, 3, (5, 400)))
    matrices = np.zeros((5, 4, 4), np.int64)
    for image in range(5):
        np.add.at(matrices[image], (true[image], predicted[image]), 1)
    return predicted, true, matrices


def test_figures_are_those_of_torchmetrics_and_scikit_learn():
    predicted, true, matrices = drawn_confusions()
    found, flat = segmentation.summarise(matrices), (true.ravel(), predicted.ravel())
    index = MulticlassJaccardIndex(4, average="none")
    theirs = index(torch.from_numpy(predicted), torch.from_numpy(true))[:3]
    iou = segmentation.class_iou(matrices.sum(0))
    np.testing.assert_allclose(iou[:3], theirs, rtol=1e-6)
    assert np.isnan(iou[3])
    assert found["mIoU"].value == pytest.approx(jaccard_score(*flat, average="macro"), abs=1e-12)
    assert found["aAcc"].value == pytest.approx(accuracy_score(*flat), abs=1e-12)
    assert found["mAcc"].value == pytest.approx(balanced_accuracy_score(*flat), abs=1e-12)


def test_standard_errors_of_a_mean_over_images_of_one_size_are_the_usual_ones():
    predicted, true, matrices = drawn_confusions()
    shares = (predicted == true).mean(1)
    usual = shares.std(ddof=1) / np.sqrt(len(shares))
    assert segmentation.summarise(matrices)["aAcc"].error == pytest.approx(usual, rel=1e-9)


def test_a_difference_in_mIoU_leaves_out_each_image_of_both():
    _, true, matrices = drawn_confusions()
    others = np.stack([np.diag(np.bincount(each, minlength=4)) for each in true])  # all correct
    others[:, 0, 1] = matrices[:, 0, 1]  # but for some
    both = {"": segmentation.summarise(others), UNTRAINED: segmentation.summarise(matrices)}
    found = with_differences(both)

    def gain(images: list[int]) -> float:
        ours, theirs = (segmentation.measures(each[images].sum(0)) for each in (others, matrices))
        return ours["mIoU"] - theirs["mIoU"]

    assert found["mIoU_difference"] == pytest.approx(gain([0, 1, 2, 3, 4]))
    left = np.array([gain([n for n in range(5) if n != image]) for image in range(5)])
    wanted = np.sqrt(4 / 5 * ((left - left.mean()) ** 2).sum())
    assert found["mIoU_difference_se"] == pytest.approx(wanted)


def test_the_commonest_class_is_what_a_constant_answer_measures():
    pixels = np.array([10, 70, 20, 0])
    matrix = np.zeros((4, 4), np.int64)
    matrix[:, 1] = pixels
    found, wanted = segmentation.summarise(matrix[None]), segmentation.constant(pixels)
    assert {key: found[key.removeprefix("constant_")].value for key in wanted} == pytest.approx(
        wanted
    )


# -- what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (41, 75), (96, 33)])
def test_windows_that_overlap_give_back_a_function_of_pixels(size):
    showing = Showing(None, (32, 32))
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    found = predict(lambda some: 2 * some[:, :2] + 1, image, showing, batch_size=3)
    torch.testing.assert_close(found, 2 * image[:, :2] + 1)


def test_images_are_scaled_and_padded_to_a_window():
    showing = Showing(60, (64, 64))
    assert showing.scaled(90, 120) == (60, 80)
    assert showing.padded(60, 80) == (64, 80)


def test_crops_keep_image_and_mask_together_and_follow_their_seed(data):
    masks = open_masks(str(data), "train", 255)
    crops = Crops(masks, 3, 40, (32, 40), (0, 0, 0), seed=3)
    image, classes = crops[2, 1]
    assert image.shape == (3, 32, 40) and classes.shape == (32, 40)
    again, _ = crops[2, 1]
    other, _ = crops[3, 1]
    assert torch.equal(image, again) and not torch.equal(image, other)
    seen = 0
    for index in range(6):
        image, classes = crops[0, index]
        for kind in range(3):
            levels = image[:, classes == kind].float()
            seen += levels.shape[1]
            if levels.shape[1] > 50:
                wanted = torch.from_numpy(COLOURS[kind]).float()
                assert float((levels.median(1).values - wanted).abs().max()) < 16
    assert seen > 2000
    assert bool((torch.stack([crops[0, i][1] for i in range(6)]) == IGNORED).any())


# -- decoders -------------------------------------------------------------------------------------


def test_the_linear_decoder_is_batch_norm_and_a_linear_layer():
    decoder, maps = LinearDecoder(4, 2, 3), [torch.randn(2, 4, 5, 6) for _ in range(2)]
    found = decoder(maps)
    joined = torch.cat(maps, 1).permute(0, 2, 3, 1)
    scaled = (joined - joined.mean((0, 1, 2))) / (joined.var((0, 1, 2), correction=0) + 1e-5).sqrt()
    wanted = torch.nn.functional.linear(
        scaled, decoder.classify.weight[:, :, 0, 0], decoder.classify.bias
    )
    torch.testing.assert_close(found.permute(0, 2, 3, 1), wanted, atol=1e-5, rtol=1e-5)


def test_pixels_without_a_class_teach_nothing():
    decoder, maps = LinearDecoder(4, 1, 3), [torch.randn(2, 4, 2, 2)]
    classes = torch.randint(0, 3, (2, 8, 8))
    classes[:, 4:] = IGNORED
    logits = torch.nn.functional.interpolate(decoder(maps), (8, 8), mode="bilinear")
    wanted = torch.nn.functional.cross_entropy(logits[:, :, :4], classes[:, :4])
    torch.testing.assert_close(decoder.loss(maps, classes), wanted)


# -- a whole evaluation ---------------------------------------------------------------------------


def test_colours_are_learned_from_a_frozen_encoder(measure: Run, data: Path):
    results = measure("segmentation", data, **QUICK, size=32)
    assert results["mIoU"] > 0.6 > results["constant_mIoU"]
    assert results["initial_mIoU"] == results["mIoU"]  # the model is untrained itself
    assert (results["classes"], results["images"], results["train_images"]) == (3, 3, 6)
    assert set(results["IoU"]) == {"class 0", "class 1", "class 2"}


def test_windows_that_are_encoded_once_are_learned_from(measure: Run, data: Path):
    results = measure("segmentation", data, **QUICK, augment=False, baseline=False)
    assert results["mIoU"] > 0.6 and results["initial_mIoU"] is None


def test_what_is_fine_tuned_is_a_copy(dense_recipe: Recipe, data: Path):
    model = build_model(dense_recipe)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings: dict[str, Any] = {**QUICK, "iterations": 3, "finetune": True, "baseline": False}
    settings |= {"lr": 0.003}
    losses = [
        results_of("segmentation", dense_recipe, data, model=model, **each)["loss"]
        for each in (settings, {**settings, "finetune": False})
    ]
    assert losses[0] != losses[1]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


def test_scenes_and_ade20k_are_read(measure: Run, tmp_path: Path):
    for split in ("train", "val"):
        settings = Settings(num_images=3, size=32, seed=0, split=split, frames=1)
        render_scenes(tmp_path / split, settings, num_workers=1)
    results = measure("segmentation", tmp_path, iterations=2, batch_size=2, baseline=False)
    assert results["classes"] == 7 and "ground and sky" in results["IoU"]
    for split in ("training", "validation"):
        for index in range(2):
            values = np.full((32, 32), 150, np.uint8)
            values[:8] = 0
            save(tmp_path / "ade" / "annotations" / split / f"{index}.png", values)
            save(tmp_path / "ade" / "images" / split / f"{index}.jpg", COLOURS[values // 150])
    masks = open_masks(str(tmp_path / "ade"), "val", None)
    classes = masks.read(0, 150)
    assert set(np.unique(classes[:8])) == {IGNORED} and set(np.unique(classes[8:])) == {149}
    scenes = open_masks(str(tmp_path), "val", None)
    line = json.loads((tmp_path / "val" / "labels.jsonl").read_text().splitlines()[1])
    areas = sum(item["area"] for item in line["objects"])
    assert (scenes.read(1, 7) > 0).sum() == areas > 0


def test_classes_that_cannot_be_learned_or_are_mostly_nowhere_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = mask_folder(tmp_path, {"train": 2, "val": 1})
    train, val = (open_masks(str(data), split, 255) for split in ("train", "val"))
    check_masks(train, val, 5)
    assert not capsys.readouterr().err
    save(data / "val" / "masks" / "000.png", np.full((40, 48), 3, np.uint8))
    check_masks(train, val, 4)
    assert "contains 'class 3', but no mask of" in capsys.readouterr().err
    for path in data.glob("*/masks/*.png"):
        save(path, np.full((40, 48), 250, np.uint8))
    check_masks(train, val, 251)
    assert (
        "the masks contain 1 of 251 classes, up to class 250. If its pixels have no class, give "
        "ignore=250\n"
    ) in capsys.readouterr().err
