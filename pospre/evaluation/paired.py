"""Paired comparisons of two models on the same images, and what a number of images can show."""

import math
from collections.abc import Sequence

import numpy as np
from numpy import ndarray
from pydantic import BaseModel, ConfigDict

NORMAL = 1.96
"""Half the width of a 95 % interval, in standard errors."""
SHOWN = 2.8
"""The smallest difference that is found in 80 % of cases, in standard errors."""
_DRAWS = 10_000
_RESAMPLES = 1_000
_FEW_DIFFER = 25  # discordant images below which the normal interval is too narrow


class Paired(BaseModel):
    """One model's figure minus another's, over the same images.

    Attributes:
        difference: of the figures.
        se: its paired standard error; None: of fewer than two images.
        p: two-sided: McNemar's exact one for right and wrong answers, a sign-flip test for other
            values per image, else normal by the jackknife's error.
        images: number of images, the units of the test.
        won: images that only the first model gets right; None: they are not right or wrong.
        lost: images that only the second one gets right.
        bootstrap: the middle 95 % of the difference over 1,000 samples of the images, drawn with
            replacement; of a figure that is no mean over images, its linear approximation.
    """

    model_config = ConfigDict(frozen=True)

    difference: float
    se: float | None
    p: float | None
    images: int
    won: int | None = None
    lost: int | None = None
    bootstrap: tuple[float, float] | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference."""
        reach = NORMAL * (self.se or 0.0)
        return self.difference - reach, self.difference + reach

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes 0; if few images differ, the exact test must agree."""
        low, high = self.interval
        outside = self.se is not None and (low > 0 or high < 0)
        few = self.won is not None and self.lost is not None
        if few and (self.won or 0) + (self.lost or 0) < _FEW_DIFFER:
            return outside and self.p is not None and self.p < 0.05
        return outside

    @property
    def shown(self) -> float:
        """The difference that this many images show in 80 % of cases.

        Where no image differs, as if a tenth did.
        """
        return SHOWN * self.se if self.se else detectable(0.1, self.images)


def of_images(own_M: ndarray, other_M: ndarray) -> Paired:
    """Compare values per image; bool: right or wrong."""
    count = len(own_M)
    if own_M.dtype == bool:
        won, lost = int((own_M & ~other_M).sum()), int((other_M & ~own_M).sum())
        gain = (won - lost) / count
        spread = math.sqrt(max(0.0, won + lost - (won - lost) ** 2 / count)) / count
        return Paired(
            difference=gain,
            se=spread,
            p=mcnemar(won, lost),
            images=count,
            won=won,
            lost=lost,
            bootstrap=bootstrap(own_M.astype(np.float64) - other_M),
        )
    gain_M = own_M.astype(np.float64) - other_M
    error = float(gain_M.std(ddof=1)) / math.sqrt(count) if count > 1 else None
    return Paired(
        difference=float(gain_M.mean()),
        se=error,
        p=sign_flip(gain_M),
        images=count,
        bootstrap=bootstrap(gain_M),
    )


def of_jackknife(
    difference: float, without_G: ndarray, error: float | None, images: int | None = None
) -> Paired:
    """Compare figures by the error of their difference without each image in turn.

    If images are left out in groups, ``images`` is their number.
    """
    p = None
    if error is not None:
        p = math.erfc(abs(difference) / error / math.sqrt(2)) if error else float(not difference)
    known_G = without_G[~np.isnan(without_G)]
    count = len(known_G)
    each = count * difference - (count - 1) * known_G  # Tukey's pseudo-values
    boot, total = bootstrap(each), count if images is None else images
    return Paired(difference=difference, se=error, p=p, images=total, bootstrap=boot)


def bootstrap(gain_M: ndarray) -> tuple[float, float] | None:
    """Return the middle 95 % of the mean over resampled images; None: fewer than two of them."""
    count = len(gain_M)
    if count < 2:
        return None
    draw, rows = np.random.default_rng(0), max(1, 2**22 // count)
    means = [
        gain_M[draw.integers(count, size=(min(rows, _RESAMPLES - start), count))].mean(1)
        for start in range(0, _RESAMPLES, rows)
    ]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def mcnemar(won: int, lost: int) -> float:
    """Return McNemar's exact two-sided p for images that only one of two models gets right."""
    count = won + lost
    whole = math.lgamma(count + 1) - count * math.log(2)
    fewer = range(min(won, lost) + 1)
    logs = [whole - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in fewer]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def sign_flip(difference_M: ndarray) -> float:
    """Return the two-sided p of a mean difference under random signs.

    All signs are tried if there are at most 10,000 ways, else 10,000 are drawn.
    """
    count = len(difference_M)
    observed = abs(difference_M.sum()) * (1 - 1e-9) - 1e-300
    if 2**count <= _DRAWS:
        signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return float((np.abs(signs @ difference_M) >= observed).mean())
    draw, hits, rows = np.random.default_rng(0), 0, max(1, 2**24 // count)
    for start in range(0, _DRAWS, rows):
        size = min(rows, _DRAWS - start), count
        drawn = 1.0 - 2.0 * draw.integers(0, 2, size, dtype=np.int8)
        hits += int((np.abs(drawn @ difference_M) >= observed).sum())
    return (hits + 1) / (_DRAWS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number by Holm's method, in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def detectable(share: float, images: int) -> float:
    """Return the difference of rates found in 80 % of cases if this share is judged differently."""
    return SHOWN * math.sqrt(share / images)
