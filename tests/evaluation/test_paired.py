"""Paired tests, what a number of images can show, and similarities: published and golden values."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from pospre.evaluation.analysis.similarity import Sums, cosine, hsic, rotation, unbiased_cka
from pospre.evaluation.estimates import compared, share, with_differences
from pospre.evaluation.paired import detectable, holm, mcnemar, of_images, sign_flip
from pospre.evaluation.registry import START, UNTRAINED


def test_p_values() -> None:
    known = {(5, 0): 0.0625, (6, 0): 0.03125, (12, 4): 0.0768, (60, 40): 0.0569, (0, 0): 1.0}
    for (won, lost), p in known.items():
        assert mcnemar(won, lost) == pytest.approx(p, abs=5e-5) == mcnemar(lost, won)
    exact = binomtest(5100, 10000).pvalue
    assert mcnemar(5100, 4900) == pytest.approx(exact, rel=1e-6)
    assert sign_flip(np.array([0.1, 0.2, -0.05, 0.3, 0, 0.15])) == 0.125
    many = np.random.default_rng(1).normal(0.02, 1, 4000)
    z = abs(many.mean()) / many.std(ddof=1) * 4000**0.5
    normal = float(torch.erfc(torch.tensor(z / 2**0.5)))
    assert sign_flip(many) == pytest.approx(normal, abs=0.02) == sign_flip(-many)
    assert sign_flip(np.zeros(30)) == 1
    assert holm([0.004, 0.02, 0.03]) == pytest.approx([0.012, 0.04, 0.04])
    assert holm([0.03, 0.004, 0.02]) == pytest.approx([0.04, 0.012, 0.04]) and holm([]) == []


@pytest.mark.parametrize(
    ("images", "points"), [(100, (6.3, 8.9, 12.5)), (300, (3.6, 5.1, 7.2)), (1000, (2.0, 2.8, 4.0))]
)
def test_power(images: int, points: tuple[float, ...]) -> None:
    found = [100 * detectable(share, images) for share in (0.05, 0.1, 0.2)]
    assert found == pytest.approx(points, abs=0.06)


def test_the_start_is_beside_every_figure() -> None:
    own = torch.tensor([True] * 60 + [False] * 40 + [True] * 50)
    start = torch.tensor([False] * 60 + [True] * 40 + [True] * 50)
    found = compared("top1", {"": own, START: start, UNTRAINED: ~own})
    paired = found["top1_over_start"]
    assert found["start_top1"] == 0.6 and (paired["won"], paired["lost"]) == (60, 40)
    assert paired["difference"] == pytest.approx(20 / 150) and paired["images"] == 150
    assert paired["se"] == pytest.approx((100 - 20**2 / 150) ** 0.5 / 150)
    scores = {key: each.double() * 3 for key, each in (("", own), (START, start))}
    by_score = compared("pck", scores)["pck_over_start"]
    assert by_score["se"] == pytest.approx(3 * paired["se"] * (150 / 149) ** 0.5)
    assert by_score["won"] is None and by_score["p"] == pytest.approx(paired["p"], abs=0.02)
    whole = torch.full((150,), 3.0)
    shares = {key: {"mIoU": share(each, whole)} for key, each in scores.items()}
    jackknife = with_differences(shares)
    assert jackknife["mIoU_over_start"]["se"] == pytest.approx(by_score["se"] / 3)
    in_groups = with_differences(shares, images=1500)["mIoU_over_start"]
    assert (jackknife["mIoU_over_start"]["images"], in_groups["images"]) == (150, 1500)
    same = of_images(own.numpy(), own.numpy())
    assert (same.difference, same.p, same.won, same.lost) == (0, 1, 0, 0) and not same.is_sure
    few = of_images(np.arange(50) < 5, np.zeros(50, dtype=bool))
    assert few.interval[0] > 0 and not few.is_sure  # the exact test does not agree
    assert "top1_over_start" not in compared("top1", {"": own})


def test_similarities() -> None:
    one = (5 * torch.arange(18) % 7).view(6, 3).double()
    other = (torch.arange(18) ** 2 % 5).view(6, 3).double()
    grams = [(each @ each.T).fill_diagonal_(0) for each in (one, other)]
    values = [float(hsic(grams[a], grams[b])) for a, b in ((0, 0), (1, 1), (0, 1))]
    assert values == pytest.approx([68.677778, 42.066667, -28.6])
    assert unbiased_cka(one, other) == pytest.approx(-0.532095, abs=1e-6)
    draw = torch.Generator().manual_seed(0)
    far = [torch.randn(300, 384, generator=draw) for _ in range(2)]
    assert abs(unbiased_cka(*far)) < 0.02 and unbiased_cka(far[0], far[0]) == pytest.approx(1)
    assert float(cosine(far[0], far[0]).min()) == 1  # exactly
    for dead in (far[0][:1].expand(300, -1), torch.zeros(300, 384)):  # images that are all alike
        assert abs(unbiased_cka(dead, far[1])) < 1e-6 and abs(unbiased_cka(dead, dead)) <= 1
    assert float(cosine(torch.zeros(384), far[1]).abs().max()) < 1e-6
    few = torch.randn(50, 96, generator=draw)  # fewer rows than dimensions
    turn = torch.linalg.qr(torch.randn(96, 96, generator=draw)).Q
    for wanted in (few, few @ turn):
        sums = Sums()
        for part in (slice(20), slice(20, None)):
            sums.add(few[part], wanted[part])
        mean, to = sums.means
        near = cosine((few - mean.float()) @ rotation(*sums.centred()).float(), wanted - to.float())
        assert float(near.min()) > (0.9999994 if wanted is few else 0.999)
