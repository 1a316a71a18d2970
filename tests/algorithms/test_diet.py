"""DIET: its golden numbers, mixed views, and the numbers of images."""

import math
from pathlib import Path

import pytest
import torch

from pospre.algorithms.diet import DIET
from pospre.algorithms.supervised.mixing import smooth_entropy
from pospre.errors import UserError
from pospre.training.resolve import with_images
from tests.algorithms.cases import random_views, tiny_model, written


def test_golden_numbers() -> None:
    logits = torch.tensor([[2.0, 0, 0, 0]])
    hard, soft = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[0.75, 0.25, 0, 0]])
    for targets, smoothing, number in (
        (hard, 0.3, 0.790753),
        (soft, 0.0, 0.840753),
        (soft, 0.3, 1.140753),
    ):
        value = smooth_entropy(logits, targets, smoothing).item()
        assert value == pytest.approx(number, abs=1e-6)


@pytest.mark.parametrize(("count", "start"), [(1000, 6.907755), (300, 5.703782)])
def test_the_loss_starts_at_ln_n_and_has_no_temperature(count: int, start: float) -> None:
    model = tiny_model(DIET(num_images=count, mixup=0.0, cutmix=0.0))
    batch = written(model, random_views())
    assert model.objectives["diet"].images.weight.shape == (count, 192)  # type: ignore[union-attr]
    with torch.no_grad():
        model.objectives["diet"].images.weight.zero_()  # type: ignore[operator,union-attr]
    assert model.loss(model(batch), batch)["diet"].item() == pytest.approx(start, abs=1e-5)
    assert math.log(count) == pytest.approx(start, abs=1e-6)


def test_a_mixed_view_is_of_both_images_and_an_evaluation_mixes_none() -> None:
    model = tiny_model(DIET(num_images=4, mix_rate=1.0, smoothing=0.0, cutmix=0.0))
    batch = written(model, random_views())
    share = batch["diet/share"]
    targets = model.objectives["diet"]._targets(batch, 4)  # type: ignore[operator]
    assert torch.equal(targets.diagonal(), share)
    assert torch.equal(targets.flip(1).diagonal(), 1 - share)
    plain = model.eval().objectives["diet"]._targets(batch, 4)  # type: ignore[operator]
    assert torch.equal(plain, torch.eye(4))


def test_without_a_class_token_patches_are_averaged() -> None:
    model = tiny_model(DIET(num_images=4), class_token=False)
    assert model.layout.passes["student"].needs_patches
    assert not tiny_model(DIET(num_images=4)).layout.passes["student"].needs_patches
    batch = written(model, random_views())
    assert model(batch)["diet"]["logits"].shape == (4, 4)


def test_numbers_that_the_head_has_no_row_for_are_refused(tmp_path: Path) -> None:
    for method, words in (
        (DIET(), r"diet\.num_images is None"),
        (DIET(num_images=100_001), "100001: the head would have as many rows"),
    ):
        with pytest.raises(UserError, match=words):
            tiny_model(method)
    with pytest.raises(UserError, match=r"images from number 0 to 3, .*num_images = 3"):
        written(tiny_model(DIET(num_images=3)), random_views())
    assert with_images("diet", {"num_images": None}, 24, "photos") == {"num_images": 24}
    assert with_images("mae", {"weight": 1.0}, 24, "photos") == {"weight": 1.0}
    with pytest.raises(UserError, match=r"diet\.num_images = 23, but data\.path = photos has 24"):
        with_images("diet", {"num_images": 23}, 24, "photos")
