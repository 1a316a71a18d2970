import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.encode.images import prepare_image
from data_prep.encode.read_items import orient_mask
from data_prep.files.archives import DamagedItem
from tests.data_prep.sample_images import encoded, picture, rotated_jpeg, write_files
from tests.data_prep.sources.fakes import converted, tar_bytes, text

SCENES = "sceneCategories.txt"


def coarse(image: Image.Image) -> np.ndarray:
    """Where an image is redder, and where greener, than it mostly is: numbers from 0 to 3."""
    pixels = np.asarray(image)
    red, green, _ = (pixels > np.median(pixels, axis=(0, 1))).transpose(2, 0, 1)
    return (red + 2 * green).astype(np.uint8)


def palette_mask(image: Image.Image) -> Image.Image:
    """A mask that shows an image coarsely, with a palette."""
    mask = Image.fromarray(coarse(image))
    mask.putpalette([0, 0, 0, 85, 0, 0, 170, 0, 0, 255, 0, 0])
    return mask


def test_a_mask_stays_on_its_image(tmp_path: Path) -> None:
    files = {SCENES: text([f"{orientation} room" for orientation in range(1, 9)])}
    for orientation in range(1, 9):
        files[f"images/training/{orientation}.jpg"] = rotated_jpeg(3, orientation)
        mask = encoded(palette_mask(picture(3)), "PNG")
        files[f"annotations/training/{orientation}.png"] = mask
    samples = converted(write_files(tmp_path / "ade", files), tmp_path / "mds")
    assert len(samples) == 8
    for sample in samples:
        image, found = (Image.open(io.BytesIO(sample[key])) for key in ("image", "annotation"))
        assert found.mode == "P" and found.size == image.size
        assert found.getpalette() == palette_mask(picture(3)).getpalette()
        assert np.mean(np.asarray(found) == coarse(image)) > 0.9


def test_json_tells_the_orientation(tmp_path: Path) -> None:
    wanted, files = {"point": [1, 2], "width": 48, "height": 32}, {}
    for name, orientation in (("a", 1), ("b", 6)):
        files[f"{name}.jpg"] = rotated_jpeg(3, orientation)
        files[f"{name}.json"] = text({"point": [1, 2]})
    path = write_files(tmp_path, {"one.tar": tar_bytes(files)}) / "one.tar"
    about = [json.loads(sample["annotation"]) for sample in converted(path, tmp_path / "mds")]
    assert about == [wanted, wanted | {"orientation": 6}]


def test_a_mask_of_the_upright_image_stays() -> None:
    image = prepare_image(rotated_jpeg(3, 6), None, 90)
    assert (image.width, image.height) == (32, 48)
    upright = encoded(Image.new("L", (64, 96)), "PNG")
    assert orient_mask(upright, image) == upright
    with pytest.raises(DamagedItem, match=r"its mask cannot be read"):
        orient_mask(upright[:40], image)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_the_orientation_of_other_formats(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    image = prepare_image(encoded(picture(), kind, exif=exif), None, 90)
    assert (image.width, image.height, image.orientation) == (32, 48, 8)
