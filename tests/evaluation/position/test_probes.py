"""The probes are scikit-learn's, and their errors those of a jackknife over images."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, r2_score

from pospre.evaluation.position.probes import (
    Probes,
    coordinates_of,
    fit_probes,
    fit_whitening,
    r_squared,
    scores,
)
from pospre.evaluation.position.settings import Tokens

GRID = (3, 4)
DECAY = 1e-2


@pytest.fixture(scope="module")
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (600, 16) that know something of their place, and the places."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 12, (600,), generator=generator)
    means = torch.randn(12, 16, generator=generator)
    mixing = torch.randn(16, 16, generator=generator)
    noise = torch.randn(600, 16, generator=generator)
    return (means[places] + 1.5 * noise) @ mixing + 5, places


@pytest.fixture(scope="module")
def probes(tokens: tuple[torch.Tensor, torch.Tensor]) -> Probes:
    return fit_probes(*tokens, GRID, Tokens(weight_decay=DECAY, iterations=500))


def test_the_classifier_is_that_of_scikit_learn(
    tokens: tuple[torch.Tensor, torch.Tensor], probes: Probes
) -> None:
    tokens_MD, places = tokens
    white = torch.nn.functional.pad(probes.whiten(tokens_MD), (0, 1), value=1.0).double().numpy()
    theirs = LogisticRegression(
        C=1 / (DECAY * len(white)), fit_intercept=False, tol=1e-8, max_iter=2000
    ).fit(white, places.numpy())
    ours = probes.classifier.double()
    np.testing.assert_allclose(
        torch.softmax(torch.from_numpy(white) @ ours, 1), theirs.predict_proba(white), atol=1e-3
    )
    assert (probes.places(tokens_MD).numpy() == theirs.predict(white)).mean() > 0.995


def test_the_regression_is_that_of_scikit_learn(
    tokens: tuple[torch.Tensor, torch.Tensor], probes: Probes
) -> None:
    tokens_MD, places = tokens
    white, targets = probes.whiten(tokens_MD).numpy(), coordinates_of(places, GRID).numpy()
    theirs = Ridge(alpha=DECAY * len(white)).fit(white, targets)
    np.testing.assert_allclose(probes.rows_and_columns(tokens_MD), theirs.predict(white), atol=1e-4)
    ours = r_squared(
        probes.rows_and_columns(tokens_MD)[:, None], torch.from_numpy(targets)[:, None]
    )
    wanted = r2_score(targets, theirs.predict(white), multioutput="variance_weighted")
    assert ours["r2"] == pytest.approx(wanted, abs=1e-5)


def test_whitened_tokens_are_white(tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
    white = fit_whitening(tokens[0])(tokens[0]).numpy()
    variance = np.linalg.eigvalsh(np.cov(tokens[0].numpy().T, ddof=0))
    left = variance / (variance + 1e-3 * variance.mean())  # 1 but for directions of next to none
    np.testing.assert_allclose(np.cov(white.T, ddof=0), np.diag(left), atol=1e-4)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-4)


def test_coordinates_are_row_major() -> None:
    assert coordinates_of(torch.tensor([0, 3, 4, 11]), GRID).tolist() == [
        [0, 0],
        [0, 3],
        [1, 0],
        [2, 3],
    ]


def test_errors_are_those_of_a_jackknife_over_images(
    tokens: tuple[torch.Tensor, torch.Tensor], probes: Probes
) -> None:
    generator = torch.Generator().manual_seed(1)
    targets = torch.rand(40, 9, 2, generator=generator)
    scale = torch.rand(40, 1, 1, generator=generator)
    predicted = targets + 0.3 * scale * torch.randn(40, 9, 2, generator=generator)
    read, places = tokens[0][:360].view(40, 9, 16), tokens[1][:360].view(40, 9)
    named = probes.places(read.flatten(0, 1)).view(40, 9)

    def without(image: int) -> tuple[float, float]:
        rest = torch.arange(40) != image
        ratio = r_squared(predicted[rest], targets[rest])["r2"]
        return ratio, accuracy_score(places[rest].flatten(), named[rest].flatten())

    left_out = np.array([without(image) for image in range(40)])
    jackknife = np.sqrt(39 / 40 * ((left_out - left_out.mean(0)) ** 2).sum(0))
    assert r_squared(predicted, targets)["r2_se"] == pytest.approx(jackknife[0], rel=0.1)
    found = scores(probes, read, places, GRID)
    assert found["top1_se"] == pytest.approx(jackknife[1], rel=1e-6)
    assert found["top1"] == pytest.approx(accuracy_score(places.flatten(), named.flatten()))
