"""Positions shifted and stretched are torch's own rolled and resampled tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from pospre.evaluation.position.shifted_positions import (
    _figures,
    _of_others,
    _tile_figures,
    mosaics_of,
    moves_of,
)
from pospre.nn.grid import interpolation_weights
from pospre.nn.places import Places
from pospre.nn.positions import build_positions
from pospre.nn.positions.scheme import TransformerDims
from pospre.training.build import build_model
from tests.evaluation.checkpoints import results_of, tiny_recipe

GRID = (3, 4)


def test_shifted_and_stretched_positions_are_those_of_the_place_before_and_of_grid_sample() -> None:
    positions = build_positions("learned", TransformerDims(8, 2, 1, GRID))
    positions.reset_parameters()
    moves, whole = moves_of(positions, shifts=(1,), zooms=(2.0,)), Places(GRID)
    device = torch.device("cpu")

    def vectors(places: Places) -> Tensor:
        return positions.added(torch.zeros(1, 12, 8), places).detach()[0].unflatten(0, GRID)

    own, shifted = vectors(whole), vectors(moves["shifted by 1"](whole, device))
    assert torch.equal(shifted[0, 0], own[1, 1])
    assert torch.equal(shifted[2, 3], own[0, 0])
    down, across = (
        interpolation_weights(((torch.arange(side) + 0.5) / side / 2 + 0.25)[None], side, "bicubic")
        for side in GRID
    )
    wanted = torch.einsum("rh,cw,hwd->rcd", down[0], across[0], own)
    found = vectors(moves["the middle, x 2"](whole, device))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert not vectors(moves["no positions"](whole, device)).any()


def test_the_nearest_neighbour_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    usual = F.normalize(torch.randn(30, 6, generator=generator))
    disturbed = F.normalize(usual + 0.3 * torch.randn(30, 6, generator=generator))
    labels = torch.arange(30) % 3
    found = _figures(disturbed, usual, labels, k=1)
    right = 0
    for row in range(30):
        others = [other for other in range(30) if other != row]
        nearest = KNeighborsClassifier(1).fit(usual[others].numpy(), labels[others].numpy())
        right += int(nearest.predict(disturbed[row : row + 1].numpy())[0] == int(labels[row]))
    assert found["top1"] == pytest.approx(right / 30)
    assert found["cosine"] == pytest.approx(float((disturbed * usual).sum(1).mean()), abs=1e-6)
    assert _figures(disturbed, usual, labels, k=30)["top1"] is None


def test_images_of_a_mosaic_do_not_vote_for_each_other() -> None:
    mosaics = mosaics_of(torch.arange(30), 2, seed=3)
    assert mosaics.shape == (7, 4) and len(mosaics.unique()) == 28
    assert not torch.equal(mosaics, mosaics_of(torch.arange(30), 2, seed=4))
    usual = torch.eye(30)
    found = _tile_figures(usual[mosaics], mosaics, usual, torch.zeros(30).long(), k=2)
    assert found["cosine"] == found["top1"] == 1
    # each image looks like the next one of its mosaic, and a little like one of its own class
    like = usual[mosaics.roll(1, 1)] + 0.1 * usual[mosaics.roll(1, 0)]
    label = torch.zeros(30).long()
    label[mosaics] = torch.arange(7)[:, None].expand(7, 4)
    found = _tile_figures(like, mosaics, usual, label.roll(0), k=1)
    assert found["top1"] == 0 and found["cosine"] == 0  # the voter is of another mosaic
    label[mosaics] = torch.arange(4)  # which has this image's class
    assert _tile_figures(like, mosaics, usual, label, k=1)["top1"] == 1


def test_a_tile_is_its_own_patches_of_the_larger_picture(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Without positions and attention, an encoder sees patches alone: a tile is as usual."""
    algorithms = {"supervised": {"num_classes": 2}}
    data = image_folder(num_images=9, size=(40, 32))
    encoder = {"image_size": (32, 16), "patch_size": 8, "positions": "none", "depth": 1}
    recipe = tiny_recipe(tmp_path, algorithms, **encoder)
    for alone in (True, False):
        model = build_model(recipe)
        if alone:
            dict(model.encoder.named_parameters())["blocks.0.attn.proj.weight"].data.zero_()
        settings: dict[str, Any] = {"k": 2, "scales": "", "mosaics": "2", "baseline": False}
        results = results_of("shifted_positions", recipe, data, model=model, **settings)
        usual, tile = results["rows"][:2]
        assert tile["what"] == "tile of 2 x 2"
        assert (abs(tile["cosine"] - 1) < 1e-6) is alone
        assert tile["top1"] is not None and usual["top1"] is not None


def test_beside_cosines_stands_that_of_two_images() -> None:
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randn(40, 6, generator=generator) + 1 for _ in range(300)]
    found = [_of_others(draw) for draw in draws]
    cosines = F.cosine_similarity(draws[0][:, None], draws[0][None], dim=-1)
    assert found[0]["cosine"] == pytest.approx(float((cosines.sum() - 40) / 1560), abs=1e-6)
    assert found[0]["top1"] is None
    spread = torch.tensor([each["cosine"] for each in found]).std()
    error = torch.tensor([each["cosine_se"] for each in found]).mean()
    assert float(error) == pytest.approx(float(spread), rel=0.15)


def test_disturbances_of_a_model(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "mae", image_size=32, patch_size=8)
    data = image_folder(num_images=9)
    settings: dict[str, Any] = {"k": 2, "shifts": "4,1", "zooms": "2", "scales": "1,0.5"}
    results = results_of("shifted_positions", recipe, data, **settings)
    rows = {row["what"]: row for row in results["rows"] if row["model"] == "trained"}
    assert list(rows) == [
        "as usual", "shifted by 4", "shifted by 1", "the middle, x 2", "no positions",
        "image at 4 x 4 patches", "image at 2 x 2 patches", "another image",
    ]  # fmt: skip
    # a shift by the whole grid, and the image at its own size, change nothing
    for what in ("as usual", "shifted by 4", "image at 4 x 4 patches"):
        assert rows[what]["cosine"] == pytest.approx(1, abs=1e-5)
        assert rows[what]["top1"] == rows["as usual"]["top1"]
    for what in ("shifted by 1", "the middle, x 2", "no positions", "image at 2 x 2 patches"):
        assert rows[what]["cosine"] < 0.9999
    disturbed = [rows[what]["cosine"] for what in list(rows)[1:-1]]
    assert results["cosine"] == pytest.approx(sum(disturbed) / len(disturbed))


ALL = ["shifted by 1", "the middle, x 2", "no positions", "image at 2 x 2 patches"]


@pytest.mark.parametrize(
    ("scheme", "measured", "left_out"),
    [
        ("none", ["image at 2 x 2 patches"], ["shifts", "zooms"]),
        ("relative", ["shifted by 1", "no positions"], ["zooms", "scales", "mosaics"]),
        *((scheme, ALL, []) for scheme in ("learned", "rotary", "rotary_mixed", "alibi")),
    ],
)
def test_what_a_scheme_does_not_take_is_left_out_and_said(
    scheme: str,
    measured: list[str],
    left_out: list[str],
    image_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    algorithms = {"supervised": {"num_classes": 2}}
    recipe = tiny_recipe(tmp_path, algorithms, image_size=32, patch_size=8, positions=scheme)
    model = build_model(recipe)
    for parameter in model.encoder.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # biases are 0 at first
    settings: dict[str, Any] = {
        "k": 2,
        "shifts": "1",
        "zooms": "2",
        "scales": "0.5",
        "baseline": False,
    }
    data = image_folder(num_images=5)
    results = results_of("shifted_positions", recipe, data, model=model, **settings)
    rows = {row["what"]: row["cosine"] for row in results["rows"]}
    assert [*rows] == ["as usual", *measured, "another image"]
    assert rows["as usual"] == pytest.approx(1, abs=1e-6)
    assert max(rows[what] for what in measured) < 1 - 1e-5
    assert results["left_out"] == left_out
