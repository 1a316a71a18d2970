"""Means over images, and the difference to the untrained model."""

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

from pospre.evaluation.estimates import Estimate, average, compared, share, with_differences
from pospre.evaluation.registry import UNTRAINED


def test_the_difference_to_the_untrained_model_is_paired() -> None:
    draw = torch.Generator().manual_seed(0)
    untrained = torch.rand(200, generator=draw) < 0.6
    trained = untrained | (torch.rand(200, generator=draw) < 0.2)  # easy images stay easy
    found = compared("top1", {"": trained, UNTRAINED: untrained})
    assert found["top1"] == float(trained.double().mean())
    assert found["initial_top1"] == float(untrained.double().mean())
    assert found["top1_difference"] == pytest.approx(found["top1"] - found["initial_top1"])
    usual = ttest_rel(trained.double(), untrained.double()).statistic
    assert found["top1_difference"] / found["top1_difference_se"] == pytest.approx(usual)
    apart = sum(rate * (1 - rate) / 200 for rate in (found["top1"], found["initial_top1"])) ** 0.5
    assert found["top1_difference_se"] < 0.7 * apart


def test_what_cannot_be_compared_is_none() -> None:
    alone = compared("error", {"": torch.tensor([1.0, 2.0])})
    assert alone.pop("error") == 1.5 and {*alone.values()} == {None}
    one = compared("error", {"": torch.ones(1), UNTRAINED: torch.zeros(1)})
    assert one["error_difference"] == 1.0 and one["error_difference_se"] is None


def test_patches_of_an_image_are_left_out_together() -> None:
    draw = np.random.default_rng(0)
    asked = draw.integers(1, 50, 40)
    right = {
        name: draw.binomial(asked, np.clip(rate + 0.3 * draw.standard_normal(40), 0, 1))
        for name, rate in (("", 0.6), (UNTRAINED, 0.5))
    }
    found = {
        name: {"top1": share(torch.tensor(each), torch.tensor(asked))}
        for name, each in right.items()
    }
    results = with_differences(found)
    rate = right[""].sum() / asked.sum()
    assert results["top1"] == pytest.approx(rate)
    left = [
        [np.delete(each, image).sum() / np.delete(asked, image).sum() for image in range(40)]
        for each in right.values()
    ]
    wanted = [np.sqrt(39 / 40 * ((each - np.mean(each)) ** 2).sum()) for each in left]
    assert [results["top1_se"], results["initial_top1_se"]] == pytest.approx(wanted)
    gain = np.subtract(left[0], left[1])
    paired = np.sqrt(39 / 40 * ((gain - gain.mean()) ** 2).sum())
    assert results["top1_difference_se"] == pytest.approx(paired)
    alone = (rate * (1 - rate) / asked.sum()) ** 0.5  # as if patches were independent
    assert results["top1_se"] > 2 * alone


def test_cells_of_the_same_images_are_not_independent() -> None:
    right = share(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([4.0, 4.0, 4.0]))
    assert average([right, right]).error == pytest.approx(right.error)
    assert right.error == pytest.approx(0.25 / 3**0.5)


def test_what_leaves_nothing_to_measure_is_no_part_of_the_error() -> None:
    assert share(torch.tensor([3.0]), torch.tensor([4.0])).error is None
    assert Estimate(0.5, np.array([np.nan, 0.4, 0.6])).error == pytest.approx(0.1)
    only = share(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0]))  # all patches in one image
    assert only.value == 0.75 and only.error is None
