"""Pictures by predicted positions: every patch lands where it should."""

import numpy as np
import pytest
import torch
from PIL import Image

from pospre.errors import UserError
from pospre.evaluation.position.mosaic import place_patches
from pospre.evaluation.position.position_pictures import compose_views, strew, table
from pospre.evaluation.run import run_evaluation
from pospre.nn.decoder import patchify
from pospre.training.checkpoints.content import load_model


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
    views = compose_views(image, 16, keep_K=keep, shown_K=shown, strewn_K=strewn, placed_K=keep)
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

    def evaluate(**settings):
        return run_evaluation(
            "position_pictures", model, recipe, data, settings, output, progress=False
        )["results"]

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
    assert results["pictures"][0]["reconstructed"] in table(results)


def test_nowhere_to_write_is_refused(droppos_checkpoint, image_folder):
    model, recipe = load_model(str(droppos_checkpoint))
    with pytest.raises(UserError, match="--output"):
        run_evaluation("position_pictures", model, recipe, image_folder(), progress=False)
