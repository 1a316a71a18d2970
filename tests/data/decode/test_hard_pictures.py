"""Formats agree on pictures that are hard: decoded smaller, in part, turned, or encoded anew."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from pospre.data.decode.decoder import OpenedImage, decode_image
from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from tests.data_prep.reading import in_format
from tests.data_prep.sample_images import turned
from tests.libraries import needs_ffcv

VIEWS = (
    ViewGroup(name="global", count=2, size=48, scale=(0.1, 0.6)),
    ViewGroup(name="local", count=3, size=16, scale=(0.05, 0.2), interpolation="bilinear"),
)
SMALL_VIEWS = (ViewGroup(size=16, scale=(0.02, 0.1)),)
NUM_EPOCHS = 3


def picture(number: int, width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(number).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind, sorted: the converter keeps the bytes of ``a_…`` only."""
    root = tmp_path_factory.mktemp("hard") / "pictures"
    root.mkdir()
    picture(0, 1280, 960).save(root / "a_large.jpg", quality=90)
    picture(1, 450, 601).save(root / "a_odd_sides.jpg", quality=85, subsampling=0)
    picture(2, 480, 400).save(root / "a_progressive.jpg", quality=90, progressive=True)
    picture(3, 401, 500).convert("L").save(root / "a_grey.jpg", quality=90)
    picture(4, 500, 400).convert("CMYK").save(root / "b_cmyk.jpg", quality=95)
    for orientation in (3, 6, 7):
        path = root / f"b_turned_{orientation}.jpg"
        picture(5, 520 + orientation, 380).save(path, quality=95, exif=turned(orientation))
    deep = np.asarray(picture(6, 300, 280).convert("L")).astype(np.uint16) * 257
    Image.fromarray(deep).save(root / "b_deep.png")
    picture(7, 300, 200).convert("RGBA").save(root / "b_alpha.png")
    frames = [picture(number, 260, 240) for number in (8, 9)]
    frames[0].save(root / "b_animated.webp", save_all=True, append_images=frames[1:], quality=95)
    Image.linear_gradient("L").resize((11, 7)).convert("RGB").save(root / "b_tiny.png")
    return root


@cache
def samples(path: Path, **options: Any) -> list[dict[str, Tensor]]:
    """Return every sample of a few epochs, in the stored order."""
    settings: dict[str, Any] = {"views": VIEWS, "batch_size": 4, "seed": 1, "num_workers": 2}
    loader = build_loader(path, **{**settings, "shuffle": False, "drop_last": False, **options})
    found = []
    for loader.epoch in range(NUM_EPOCHS):
        for batch in loader:
            rows = range(len(batch["index"]))
            found += [{key: value[row] for key, value in batch.items()} for row in rows]
    return found


def names(hard: Path) -> list[str]:
    return sorted(path.name for path in hard.iterdir()) * NUM_EPOCHS


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
@pytest.mark.parametrize("name", ["mds", "ffcv"])
def test_formats_agree(hard, name, tolerance):
    """To the bit where the bytes are the files'; else in all but what JPEG at 95 changes."""
    found = samples(in_format(hard, name, "--quality", 95), tolerance=tolerance)
    expected = samples(hard, tolerance=tolerance)
    assert len(found) == len(expected) == len(names(hard))
    for file, one, other in zip(names(hard), found, expected, strict=True):
        for key, value in other.items():
            if file.startswith("a_") or not key.endswith("/image"):
                assert torch.equal(one[key], value), f"{key} of {file}"
            else:
                error = (one[key].float() - value.float()).square().mean().sqrt()
                assert error < 6, f"{key} of {file}: {error}"


def test_they_are_hard(hard, monkeypatch):
    """The large JPEGs are decoded smaller and in part, and only those."""
    decoded: dict[int, list[Any]] = {}
    real = OpenedImage.decode

    def record(self: OpenedImage, *arguments: Any) -> Any:
        picture, *others = result = real(self, *arguments)
        decoded.setdefault(self.width * self.height, []).append((others[0], len(picture)))
        return result

    monkeypatch.setattr(OpenedImage, "decode", record)
    samples(hard, views=SMALL_VIEWS, num_workers=0)
    for file in hard.iterdir():
        image = OpenedImage(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))
        shrinks, rows = zip(*decoded[image.width * image.height], strict=True)
        if file.name.startswith("a_"):
            assert max(shrinks) >= (4 if "large" in file.name else 2), file
        if file.name in ("a_large.jpg", "a_grey.jpg"):
            assert min(np.multiply(shrinks, rows)) < 0.9 * image.height, file
        if file.suffix != ".jpg" or "turned" in file.name:
            assert set(shrinks) == {1} and min(rows) == image.height, file


def test_raw_pixels_agree_with_a_lossless_folder(hard, tmp_path):
    """A ``.beton`` of raw pixels, as FFCV's own writer makes it, and PNGs of the same."""
    needs_ffcv()
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    reader = open_reader(hard)
    pictures = [decode_image(reader.read(index).encoded) for index in range(len(reader))]
    lossless = tmp_path / "lossless"
    lossless.mkdir()
    for number, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(lossless / f"{number:02d}.png", compress_level=1)
    path = tmp_path / "raw.beton"
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    data = [(pixels, -1) for pixels in pictures]
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(data)
    for tolerance in (0.0, 1.0):
        found, expected, files = (
            samples(some, tolerance=tolerance) for some in (path, lossless, hard)
        )
        for one, other, file in zip(found, expected, files, strict=True):
            for key, value in other.items():
                assert torch.equal(one[key], value), key
                if tolerance == 0:  # nothing is decoded smaller: the JPEGs' pixels are these, too
                    assert torch.equal(one[key], file[key]), key
