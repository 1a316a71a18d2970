"""Pictures by predicted positions: every patch lands where it should."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from pospre.errors import UserError
from pospre.evaluation.position.mosaic import Puzzle, compose_views, place_patches
from pospre.evaluation.position.position_pictures import VIEWS, strew
from pospre.evaluation.position.predictions import Placed, Placer
from pospre.evaluation.run import run_evaluation
from pospre.nn.encoder_interface import patchify
from pospre.training.build import build_model, load_model
from tests.evaluation.checkpoints import results_of, tiny_recipe


def random_image(height=32, width=48):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def test_patches_in_their_places_are_the_image():
    image = random_image()
    patches = patchify(image[None], (16, 16))[0]
    assert torch.equal(place_patches(patches, torch.arange(6), (2, 3)), image)


def test_collisions_are_averaged_and_empty_places_black():
    patches = torch.stack([torch.full((3 * 8 * 8,), value) for value in (10, 30, 200)]).byte()
    mosaic = place_patches(patches, torch.tensor([2, 2, 0]), (2, 2))
    assert mosaic[:, 8:, :8].unique().tolist() == [20]
    assert mosaic[:, :8, :8].unique().tolist() == [200]
    assert mosaic[:, :, 8:].unique().tolist() == [0]


def test_strewn_patches_fill_free_places_once():
    keep = torch.stack([torch.randperm(16)[:12] for _ in range(5)])
    dropped = torch.arange(12).expand(5, -1) >= 4
    strewn = strew(torch.arange(5), keep, dropped, 16, seed=0)
    assert torch.equal(strewn[:, :4], keep[:, :4])
    assert all(len(row.unique()) == 12 for row in strewn)
    assert torch.equal(strewn, strew(torch.arange(5), keep, dropped, 16, seed=0))
    assert not torch.equal(strewn, strew(torch.arange(5), keep, dropped, 16, seed=1))


def test_views_frame_the_shown_patches_only():
    image = random_image(32, 32)
    keep, shown = torch.tensor([0, 1, 2, 3]), torch.tensor([True, False, False, False])
    strewn = torch.tensor([0, 2, 3, 1])
    puzzle = Puzzle(image, keep, shown, asked=~shown, strewn=strewn, placed=keep, true=keep)
    views = compose_views(puzzle, image, 16)
    large = image.permute(1, 2, 0).numpy().repeat(7, axis=0).repeat(7, axis=1)
    assert np.array_equal(views["original"], large) and large.shape == (224, 224, 3)
    different = (views["reconstructed"] != large).any(axis=2)
    assert (
        different[:112, :112].any() and not different[112:].any() and not different[:, 112:].any()
    )
    assert not different[7:105, 7:105].any()
    cells = {0: (0, 0), 1: (0, 112), 2: (112, 0), 3: (112, 112)}
    for patch, place in zip(keep.tolist()[1:], strewn.tolist()[1:], strict=True):
        (row, column), (true_row, true_column) = cells[place], cells[patch]
        assert np.array_equal(
            views["shuffled"][row : row + 112, column : column + 112],
            large[true_row : true_row + 112, true_column : true_column + 112],
        )


def test_evaluation_writes_pictures_and_removes_older_ones(
    droppos_checkpoint, image_folder, tmp_path
):
    model, recipe = load_model(str(droppos_checkpoint))
    data, output = image_folder(num_images=6), tmp_path / "pictures.json"

    evaluate = partial(results_of, "position_pictures", recipe, data, output, model)
    assert len(evaluate(num_pictures=4)["pictures"]) == 4
    results = evaluate(num_pictures=2, mask_ratio=0.5, seed=3)
    written = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert written == sorted(
        picture[view]
        for picture in results["pictures"]
        for view in ("original", "shuffled", "reconstructed")
    )
    for name in written:
        with Image.open(tmp_path / "pictures" / name) as picture:
            assert picture.size == (256, 256)
    assert all(0 <= picture["accuracy"] <= 1 for picture in results["pictures"])


def test_nowhere_to_write_is_refused(droppos_checkpoint, image_folder):
    model, recipe = load_model(str(droppos_checkpoint))
    with pytest.raises(UserError, match="--output"):
        run_evaluation("position_pictures", model, recipe, image_folder(), progress=False)


@pytest.fixture(scope="module")
def mp3(tmp_path_factory):
    small = {"image_size": 32, "patch_size": 8, "depth": 1, "positions": "none"}
    recipe = tiny_recipe(tmp_path_factory.mktemp("runs"), {"mp3": {}}, **small)
    return build_model(recipe).eval(), recipe


@pytest.fixture
def numbered(tmp_path):
    """Return images whose patches say their place in red, and in green who they are."""
    place = torch.arange(16).view(4, 4).repeat_interleave(8, 0).repeat_interleave(8, 1)
    (tmp_path / "numbered").mkdir()
    for image in range(4):
        pixels = torch.stack([16 * place, 60 * image + 0 * place, 0 * place], dim=2).byte()
        Image.fromarray(pixels.numpy()).save(tmp_path / "numbered" / f"{image}.png")
    return tmp_path / "numbered"


def read_red(self, batch, *ratios):
    """Predict as a ``Placer`` does, from the colour of a patch; half are the context."""
    red = patchify(batch["view/image"][:, 0], (8, 8))[..., 0].float()
    logits = -(red[..., None] / 16 - torch.arange(16.0)).abs()
    everyone = torch.ones_like(red, dtype=torch.bool)
    places = torch.arange(16).expand(len(red), -1)
    return Placed(logits, places, everyone, places < 8)


def run_pictures(mp3, data, output, **settings):
    model, recipe = mp3
    return results_of("position_pictures", recipe, data, output, model, **settings)


def test_pictures_of_mp3_frame_the_context(mp3, numbered, tmp_path, monkeypatch):
    results = run_pictures(mp3, numbered, tmp_path / "own.json", num_pictures=2)
    assert len(results["pictures"]) == 2 and results["position_mask_ratio"] is None
    assert all(0 <= picture["accuracy"] <= 1 for picture in results["pictures"])
    monkeypatch.setattr(Placer, "__call__", read_red)
    results = run_pictures(mp3, numbered, tmp_path / "read.json", num_pictures=2, mask_ratio=0.5)
    for picture in results["pictures"]:
        assert picture["accuracy"] == 1
        views = [np.array(Image.open(tmp_path / "read" / picture[view])) for view in VIEWS]
        middles = [view[28::56, 28::56].reshape(16, 3) for view in views]
        assert np.array_equal(middles[0], middles[2])
        assert not np.array_equal(middles[0], middles[1])
        framed = (views[2] != views[0]).any(axis=2).reshape(4, 56, 4, 56).any(axis=(1, 3)).ravel()
        assert framed.tolist() == [True] * 8 + [False] * 8


def test_two_images_are_mixed_and_each_half_is_put_in_order(mp3, numbered, tmp_path, monkeypatch):
    monkeypatch.setattr(Placer, "__call__", read_red)
    results = run_pictures(mp3, numbered, tmp_path / "mixed.json", num_pictures=4, mixed=True)
    assert [picture["accuracy"] for picture in results["pictures"]] == [1.0] * 4
    used = []
    for picture in results["pictures"]:
        original, shuffled, put = (
            np.array(Image.open(tmp_path / "mixed" / picture[view])) for view in VIEWS
        )
        assert original.shape == (224, 448, 3) and put.shape == (224, 224, 3)
        middles = put[28::56, 28::56].reshape(16, 3)
        there = middles[:, 1:].any(1) | (middles[:, 0] > 0)
        assert np.array_equal(middles[there, 0], 16 * np.arange(16)[there])
        patches = shuffled[28::56, 28::56].reshape(16, 3)
        assert len(np.unique(patches[:, 1])) == 2
        used += [tuple(patch) for patch in patches]
    assert len(set(used)) == 64  # every patch of the four images, once


def test_what_the_pictures_are_not_for_is_said(mp3, mae_checkpoint, droppos_checkpoint, numbered):
    def message(model, recipe, **settings):
        with pytest.raises(UserError) as error:
            run_evaluation("position_pictures", model, recipe, numbered, settings, progress=False)
        return str(error.value)

    assert "this recipe has mae; give a run" in message(*load_model(str(mae_checkpoint)))
    assert "algorithms.mp3 has no such option" in message(*mp3, position_mask_ratio=0.5)
    assert "if patches have no positions" in message(
        *load_model(str(droppos_checkpoint)), mixed=True
    )
    assert "an even number" in message(*mp3, mixed=True, num_pictures=3)
