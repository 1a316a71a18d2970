"""Means over images, and the difference to the untrained model."""

import pytest
import torch
from scipy.stats import ttest_rel

from pospre.evaluation.estimates import compared
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
