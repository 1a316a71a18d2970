"""Dense evaluations see the same upright pixels as training, and masks that fit them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from PIL import Image

from pospre.data.decode.bit_depth import RGB, Decoding, DeepRange
from pospre.data.decode.decoder import decode_image
from pospre.data.stores.files import read_bytes
from pospre.errors import UserError
from pospre.evaluation.dense.detection.box_data import open_boxes
from pospre.evaluation.dense.images import decoding_of, image_sides, read_image, read_mask
from pospre.evaluation.dense.segmentation.mask_data import check_masks, open_masks
from pospre.evaluation.dense.video.video_data import check_video, open_videos
from pospre.recipe.recipe import Recipe
from tests.data_prep.sample_images import turned
from tests.evaluation.dense.pictures import davis_folder, mask_folder, voc_folder

SIDES = (20, 30)


def save_turned(path: Path, image: ndarray) -> None:
    """Save a picture as a camera held on its side does: turned, with an orientation in EXIF."""
    stored = Image.fromarray(np.ascontiguousarray(np.rot90(image)))
    options: dict[str, Any] = {"quality": 95, "subsampling": 0} if path.suffix == ".jpg" else {}
    stored.save(path, exif=turned(6), **options)


def write_deep(path: Path, generator: np.random.Generator) -> None:
    Image.fromarray(generator.integers(0, 4096, SIDES).astype(np.uint16)).save(path)


def write_floats(path: Path, generator: np.random.Generator) -> None:
    Image.fromarray(generator.random(SIDES).astype(np.float32)).save(path)


def write_array(path: Path, generator: np.random.Generator) -> None:
    np.save(path, generator.integers(0, 1000, (3, *SIDES)).astype(np.int16))


def write_photo(path: Path, generator: np.random.Generator) -> None:
    pixels = generator.integers(0, 256, (*SIDES, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path, exif=turned(8))


@pytest.mark.parametrize(
    ("name", "write", "sides"),
    [
        ("deep.png", write_deep, SIDES),
        ("deep.tif", write_deep, SIDES),
        ("floats.tif", write_floats, SIDES),
        ("array.npy", write_array, SIDES),
        ("photo.jpg", write_photo, SIDES[::-1]),
        ("photo.png", write_photo, SIDES[::-1]),
        ("photo.webp", write_photo, SIDES[::-1]),
    ],
)
def test_pixels_are_those_of_training(
    tmp_path: Path, name: str, write: Callable[..., None], sides: tuple[int, int]
) -> None:
    path = tmp_path / name
    write(path, np.random.default_rng(0))
    for decoding in (RGB, Decoding(deep_range=DeepRange(100, 900))):
        seen = torch.from_numpy(decode_image(read_bytes(path), decoding)).permute(2, 0, 1)
        assert torch.equal(read_image(path, decoding), seen)
        assert image_sides(path) == sides == tuple(seen.shape[1:])
    assert 20 < float(read_image(path, RGB).float().mean()) < 235


def test_deep_range_is_the_recipe_s(dense_recipe: Recipe) -> None:
    data = dense_recipe.data.model_copy(update={"deep_range": (0.0, 4096.0)})
    asked = decoding_of(dense_recipe.model_copy(update={"data": data}))
    assert asked == Decoding(3, DeepRange(0.0, 4096.0)) and decoding_of(dense_recipe) == RGB


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    long = np.random.default_rng(0).bytes(300_000)
    Image.new("RGB", SIDES).save(path, exif=turned(1), icc_profile=long)
    assert image_sides(path) == SIDES[::-1]


def test_turned_photographs_fit_upright_masks_and_boxes(tmp_path: Path) -> None:
    masks = mask_folder(tmp_path / "masks", {"train": 1, "val": 1}, (40, 48))
    davis = davis_folder(tmp_path / "davis", num_frames=3)
    voc = voc_folder(tmp_path / "voc", {"val": 1}, (40, 64))
    for path in (*masks.rglob("*.jpg"), *davis.rglob("*.jpg"), *voc.rglob("*.jpg")):
        upright = np.asarray(Image.open(path))
        path.unlink()  # any format will do
        save_turned(path.with_suffix(".png"), upright)
        assert np.array_equal(read_image(path.with_suffix(".png"), RGB).permute(1, 2, 0), upright)
    mask = masks / "val" / "masks" / "000.png"
    values = read_mask(mask)
    train, val = (open_masks(str(masks), split, 255) for split in ("train", "val"))
    check_masks(train, val, 3)
    assert val.image(0).shape == (3, 40, 48)
    save_turned(mask, values.astype(np.uint8))
    assert np.array_equal(read_mask(mask), values)
    (video,) = open_videos(str(davis), "2017/val")
    check_video(video)
    assert video.image(0).shape == (3, 64, 80)
    assert open_boxes(str(voc), "val").sides == [(40, 64)]
    Image.fromarray(np.rot90(values).astype(np.uint8)).save(mask)
    with pytest.raises(UserError, match=r"000\.png is 40×48, but .*another size, upright by its"):
        check_masks(train, val, 3)
    annotation = voc / "Annotations" / "val000.xml"
    size = "<annotation><size><width>40</width><height>64</height></size>"
    annotation.write_text(annotation.read_text().replace("<annotation>", size))
    with pytest.raises(UserError, match=r"height and width \(64, 40\), but upright .* \(40, 64\)"):
        open_boxes(str(voc), "val")
