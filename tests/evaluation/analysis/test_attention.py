"""Attention distance, entropy and mutual information: known answers, plain loops, scikit-learn."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import normalized_mutual_info_score

from pospre.evaluation import layers as module
from pospre.evaluation.analysis.attention import head_figures, line_shares, pixel_distances
from pospre.evaluation.estimates import mean_and_error
from pospre.evaluation.layers import attention_maps
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from tests.evaluation.analysis.small import Analyse, small_recipe


@pytest.mark.parametrize(("grid", "pixels"), [((14, 14), 116.5), ((30, 30), 250.1)])
def test_uniform_attention_is_known(grid: tuple[int, int], pixels: float) -> None:
    patches = grid[0] * grid[1]
    uniform = torch.full((1, 1, patches, patches), 1 / patches)
    found = head_figures(uniform, pixel_distances(grid, (16, 16)))
    assert float(found["distance"]) == pytest.approx(pixels, abs=0.05)
    assert float(found["nmi"]) == pytest.approx(0, abs=1e-4)
    assert float(found["entropy"]) == pytest.approx(math.log(patches), abs=1e-5)


def test_attention_to_oneself_and_to_one_patch() -> None:
    far = pixel_distances((3, 5), (8, 8))
    own = head_figures(torch.eye(15)[None, None], far)
    assert [float(own[name]) for name in ("distance", "entropy")] == [0, 0]
    assert float(own["nmi"]) == pytest.approx(1, abs=1e-6)
    one = torch.zeros(1, 1, 15, 15)
    one[..., 0] = 1
    found = head_figures(one, far)
    assert float(found["nmi"]) == float(found["entropy"]) == 0
    corner = [math.dist((0, 0), (row, column)) for row in range(3) for column in range(5)]
    assert float(found["distance"]) == pytest.approx(8 * np.mean(corner), rel=1e-6)


def test_any_attention_is_as_scikit_learn_and_scipy_have_it() -> None:
    grid, pairs = (3, 4), 40
    counts = np.random.default_rng(0).multinomial(pairs, np.full(12, 1 / 12), size=(2, 3, 12))
    maps = torch.from_numpy(counts / pairs).float()
    found = head_figures(maps, pixel_distances(grid, (16, 8)))
    for image, head in np.ndindex(2, 3):
        count = counts[image, head]
        query, key = (axis.ravel() for axis in np.indices((12, 12)))
        labels = query.repeat(count.ravel()), key.repeat(count.ravel())
        nmi = normalized_mutual_info_score(*labels, average_method="geometric")
        assert float(found["nmi"][image, head]) == pytest.approx(nmi, abs=1e-5)
        entropy = scipy.stats.entropy(count / pairs, axis=1).mean()
        assert float(found["entropy"][image, head]) == pytest.approx(entropy, abs=1e-5)
        distance: Any = 0.0
        for one, other in np.ndindex(12, 12):
            down, across = one // 4 - other // 4, one % 4 - other % 4
            distance += count[one, other] / pairs * math.hypot(16 * down, 8 * across) / 12
        assert float(found["distance"][image, head]) == pytest.approx(distance, rel=1e-5)


def test_lines_are_told_from_the_rest() -> None:
    stripes = torch.tensor([0.0, 1.0, 0.0, 2.0]).expand(3, 4).reshape(1, 1, 12) / 9
    maps = stripes.expand(1, 12, 12)
    upright = {name: float(share) for name, share in line_shares(maps, (3, 4)).items()}
    assert upright == {"columns": pytest.approx(1), "rows": pytest.approx(0)}
    lying = line_shares(maps.unflatten(2, (3, 4)).transpose(2, 3).flatten(2), (4, 3))
    assert float(lying["columns"]) == pytest.approx(0) and float(lying["rows"]) == pytest.approx(1)
    flat = line_shares(torch.full((2, 12, 12), 1 / 12), (3, 4))
    assert flat["columns"].tolist() == flat["rows"].tolist() == [0, 0]


def test_prefix_tokens_are_left_out_and_parts_come_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = build_encoder(
        "vit_tiny16", image_size=32, patch_size=8, depth=3, positions="learned", num_registers=2
    )
    model = PretrainModel(encoder, seed=0).eval()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = {}
    for layer, maps in zip((1, 3), attention_maps(model, images, [1, 3]), strict=True):
        assert maps.shape[-1] == 3 + 16
        expected[layer] = maps[..., 3:, 3:] / maps[..., 3:, 3:].sum(-1, keepdim=True)
    for limit in (2**28, 1):
        monkeypatch.setattr(module, "BYTES_AT_ONCE", limit)
        parts: dict[int, list[torch.Tensor]] = {1: [], 3: []}
        for layer, maps in module.patch_attention(model, images, [1, 3]):
            parts[layer].append(maps)
        assert len(parts[1]) == (1 if limit > 1 else 3)
        for layer, maps in expected.items():
            torch.testing.assert_close(torch.cat(parts[layer]), maps)


def test_mean_and_error_are_numpys() -> None:
    values = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    found = mean_and_error("x", values)
    assert found["x"] == pytest.approx(values.double().mean(0).tolist())
    assert found["x_se"] == pytest.approx(scipy.stats.sem(values.double().numpy()).tolist())
    assert mean_and_error("x", values[:1])["x_se"] is None


def test_evaluation_measures_every_layer_and_draws(analyse: Analyse, tmp_path: Path) -> None:
    recipe = small_recipe()
    results = analyse("attention", recipe, batch_size=4, num_pictures=2)
    assert [row["layer"] for row in results["layers"]] == [1, 2] and results["samples"] == 6
    assert results["pictures"] == ["attention.png", "queries.png"]
    for row in results["layers"]:
        for name, limit in (("distance", 45), ("nmi", 1), ("entropy", math.log(16))):
            heads = row["heads"]
            assert len(heads[name]) == len(heads[f"{name}_se"]) == 4
            assert 0 < row[name] <= limit and row[f"{name}_se"] >= 0
            assert row[name] == pytest.approx(np.mean(heads[name]))
    assert json.loads(json.dumps(results)) == results
    assert results["arrays"] == "queries.npz"
    with np.load(next(tmp_path.rglob("queries.npz"))) as arrays:
        assert arrays["images"].shape[:2] == (2, 3) and arrays["images"].max() > 1
        assert arrays["maps"].shape == (2, 4, 3, *results["grid"])
        assert arrays["maps"].sum((-2, -1)) == pytest.approx(1, abs=1e-4)
    other = analyse("attention", recipe, batch_size=1, folder=False, layers=[2])
    assert other["layers"][0]["distance"] == pytest.approx(results["layers"][1]["distance"])
    assert other["pictures"] == []


def test_larger_views_have_more_patches(analyse: Analyse) -> None:
    results = analyse("attention", small_recipe(), image_size=64, queries=[63], folder=False)
    assert (results["grid"], results["image_size"], results["queries"]) == ([8, 8], [64, 64], [63])
    assert results["uniform"]["entropy"] == pytest.approx(math.log(64))
