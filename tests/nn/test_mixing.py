"""Mixup and CutMix: the law of the draws, the pixels, and the shares."""

import numpy as np
import pytest
import torch

from pospre import draws
from pospre.nn.mixing import beta_quantiles, draw_mix, from_quantiles, mix_pixels


def uniform(size: int) -> torch.Tensor:
    keys = draws.sample_keys(0, 1, torch.arange(size), 0, "test")
    return draws.uniform(keys, 5)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 4.0])
def test_quantiles_are_those_of_beta(alpha: float) -> None:
    found = from_quantiles(beta_quantiles(alpha), uniform(20000)[:, 2]).numpy()
    expected = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    grid = np.linspace(0.02, 0.98, 25)
    np.testing.assert_allclose(np.quantile(found, grid), np.quantile(expected, grid), atol=0.012)
    assert found.mean() == pytest.approx(0.5, abs=0.01)
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


def test_half_of_the_mixed_samples_are_cut_and_the_share_is_the_area() -> None:
    mix = draw_mix(uniform(4000), (48, 32), mixup=0.8, cutmix=1.0, rate=0.75, switch_rate=0.5)
    top, bottom, left, right = mix.box.unbind(1)
    area = (bottom - top) * (right - left)
    cut, blended = area > 0, mix.blend < 1
    assert not (cut & blended).any()
    assert float(cut.float().mean()) == pytest.approx(0.375, abs=0.03)  # a few boxes are empty
    assert float(blended.float().mean()) == pytest.approx(0.375, abs=0.03)
    torch.testing.assert_close(mix.share[cut], 1 - area[cut] / (48 * 32))
    assert torch.equal(mix.share[blended], mix.blend[blended])
    assert (mix.share[~cut & ~blended] == 1).all()
    assert mix.box.min() == 0 and bottom.max() <= 48 and right.max() <= 32


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_one_of_the_two_alone(mixup: float, cutmix: float) -> None:
    mix = draw_mix(uniform(64), (32, 32), mixup=mixup, cutmix=cutmix, rate=1.0, switch_rate=0.5)
    assert bool((mix.blend < 1).any()) == bool(mixup)
    area = (mix.box[:, 1] - mix.box[:, 0]) * (mix.box[:, 3] - mix.box[:, 2])
    assert bool(area.any()) == bool(cutmix)
    assert (mix.share < 1).float().mean() > 0.9


def test_a_draw_depends_on_its_own_sample_only() -> None:
    options = {"mixup": 0.8, "cutmix": 1.0, "rate": 1.0, "switch_rate": 0.5}
    whole = draw_mix(uniform(8), (32, 32), **options)
    part = draw_mix(uniform(8)[2:5], (32, 32), **options)
    for all_samples, some in zip(whole, part, strict=True):
        assert torch.equal(all_samples[2:5], some)


def test_pixels_come_from_the_sample_and_its_partner_in_these_shares() -> None:
    mix = draw_mix(uniform(6), (32, 32), mixup=0.8, cutmix=1.0, rate=1.0, switch_rate=0.5)
    own = torch.arange(6.0).view(6, 1, 1, 1, 1).expand(6, 1, 3, 32, 32)
    mean = mix_pixels(own, mix).mean((1, 2, 3, 4))
    numbers = torch.arange(6.0)
    torch.testing.assert_close(mean, mix.share * numbers + (1 - mix.share) * numbers.flip(0))
