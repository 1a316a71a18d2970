"""Images of other than three channels: the same views from every store, and what is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pospre.data.decode.bit_depth import Decoding
from pospre.data.decode.decoder import DecodeError, decode_image
from pospre.data.loader import build_loader
from pospre.data.memory import estimate_memory
from pospre.data.opening import open_reader
from pospre.data.views.boxes import box_crops
from pospre.data.views.decode_crops import Views, resize_crops
from pospre.data.views.options import INTERPOLATIONS, ViewGroup
from pospre.errors import UserError
from tests.conftest import draw_image
from tests.data.deep_files import band_folder, bands, npy, saved
from tests.data_prep.reading import FORMATS, converted, destination, run

VIEWS = [ViewGroup(size=(24, 32), count=2), ViewGroup(name="pad", size=16, crop="pad")]
OPTIONS: dict[str, Any] = {"views": VIEWS, "batch_size": 6, "seed": 3, "num_workers": 1}
RANGE = (0, 4096)


def decode(data: bytes, channels: int) -> np.ndarray:
    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), Decoding(channels))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return band_folder(tmp_path / "arrays")


@pytest.fixture
def shards(folder: Path, tmp_path: Path) -> Path:
    options = ("--channels", 6, "--deep-range", "0,4096")
    return converted(folder, tmp_path / "shards", *options)


def test_views_of_arrays_and_shards_are_the_same_bits(folder: Path, shards: Path) -> None:
    ours = build_loader(shards, **OPTIONS)
    files = build_loader(folder, **OPTIONS, channels=6, deep_range=RANGE)
    for one, other in zip(ours, files, strict=True):
        assert one["view/image"].shape == (6, 2, 6, 24, 32)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert ours.reader.decoding == Decoding(6) and ours.classes == files.classes == ["cat", "dog"]


def test_views_of_tiffs_are_those_of_arrays(folder: Path, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    for path in sorted(folder.rglob("*.npy")):
        values = np.load(path)
        first = values.shape[0] == 6
        target = tmp_path / "tiffs" / path.relative_to(folder).with_suffix(".tif")
        target.parent.mkdir(parents=True, exist_ok=True)
        kind = {"planarconfig": "separate", "compression": "zlib"} if first else {}
        tifffile.imwrite(target, values, photometric="minisblack", **kind)
    one = next(iter(build_loader(tmp_path / "tiffs", **OPTIONS, channels=6)))
    other = next(iter(build_loader(folder, **OPTIONS, channels=6)))
    assert torch.equal(one["view/image"], other["view/image"])


def test_a_turned_tiff_is_made_upright() -> None:
    tifffile = pytest.importorskip("tifffile")
    values = bands(0, 5, np.uint8)
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, values, photometric="minisblack", extratags=[(274, "H", 1, 6, False)])
    assert np.array_equal(decode(buffer.getvalue(), 5), np.rot90(values, -1))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("channels", [1, 2, 4, 6, 13])
def test_every_channel_is_resized_as_colours_are(interpolation: str, channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 120, channels), dtype=np.uint8)
    crops = box_crops(np.array([[3, 7, 80, 70], [30, 40, 20, 25]]), (120, 90), (48, 48))

    def cut(source: np.ndarray) -> np.ndarray:
        views = np.empty((2, 48, 48, source.shape[2]), np.uint8)
        resize_crops(source, [Views(crops, views, interpolation)])
        return views

    found = cut(image)
    for channel in range(channels):
        alone = np.repeat(image[..., channel : channel + 1], 3, axis=2)
        assert np.array_equal(found[..., channel], cut(alone)[..., 0])


def test_grey_is_pillows_whatever_the_file(tmp_path: Path) -> None:
    picture = draw_image(1, 80, 60)
    for kind in ("PNG", "JPEG"):
        data = saved(np.asarray(picture), kind)
        wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB").convert("L"))
        assert np.array_equal(decode(data, 1)[..., 0], wanted)
    level = np.asarray(picture.convert("L"))
    assert np.array_equal(decode(saved(level, "PNG"), 1)[..., 0], level)
    assert np.array_equal(decode(npy(level), 1)[..., 0], level)
    assert np.array_equal(decode(npy(level), 3), np.repeat(level[..., None], 3, 2))


@pytest.mark.parametrize("store", FORMATS)
def test_one_channel_from_every_store(store: str, tmp_path: Path) -> None:
    source, target = tmp_path / "files", destination(tmp_path, store)
    source.mkdir()
    for number in range(6):
        draw_image(number, 80, 60).save(source / f"{number}.jpg")
    converted(source, target, "--channels", 1)
    one = next(iter(build_loader(target, **OPTIONS)))
    other = next(iter(build_loader(source, **OPTIONS, channels=1)))
    assert one["view/image"].shape == (6, 2, 1, 24, 32)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 4), ("LA", 2), ("CMYK", 4)])
def test_bands_of_pictures_stay_as_they_are(mode: str, channels: int) -> None:
    picture = draw_image(2, 20, 10).convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, "TIFF" if mode == "CMYK" else "PNG")
    if mode == "CMYK":
        pytest.importorskip("tifffile")
    assert np.array_equal(decode(buffer.getvalue(), channels), np.asarray(picture))


@pytest.mark.parametrize(
    ("data", "channels", "message"),
    [
        (npy(bands(0, 6)), 5, "36 x 44 x 6, but 5 channels are needed"),
        (npy(bands(0, 6)), 3, "36 x 44 x 6, but 3 or 1 channels are needed"),
        (npy(np.zeros((2, 3, 4, 5))), 6, "the shape 2 x 3 x 4 x 5"),
        (npy(np.zeros((0, 4, 6))), 6, "the shape 0 x 4 x 6"),
        (npy(bands(0))[:-1], 6, "EOF: reading array data"),
        (npy(np.zeros((4, 4, 6), complex)), 6, "not of numbers"),
        (npy(np.array([{}], object)), 6, "Object arrays cannot be loaded"),
        (b"\x93NUMPY\x07\x00", 6, "version .*7, 0"),
        (b"\x93NUMPY\x01\x00\xff", 6, "."),
        (saved(np.zeros((8, 8, 3), np.uint8), "JPEG"), 6, "a JPEG has no 6 channels"),
        (saved(np.zeros((8, 8, 3), np.uint8), "PNG"), 6, "8 x 8 x 3, but 6 channels"),
    ],
)
def test_what_cannot_be_so_is_said(data: bytes, channels: int, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(data, channels)


@pytest.mark.parametrize("shape", [b"(40000, 40000), }", b"(4000000, 4000000), }"])
def test_an_array_that_claims_to_be_huge_is_refused(shape: bytes) -> None:
    data = npy(np.zeros((4, 4), np.uint8)).replace(b"(4, 4), }", shape)
    with pytest.raises(DecodeError, match=r"EOF|Unable to allocate"):
        decode(data, 1)


def test_channels_that_were_not_stored_are_refused(shards: Path) -> None:
    for channels in (1, 3, 5):
        with pytest.raises(UserError, match=rf"encoder\.channels = {channels}, but .*channels 6"):
            open_reader(shards, channels=channels)
    with pytest.raises(UserError, match=r"data\.deep_range = 0\.\.255.* with --deep-range 0,4096"):
        open_reader(shards, deep_range=(0, 255))
    assert open_reader(shards, deep_range=RANGE).decoding.channels == 6


def test_arrays_beside_pictures_are_no_images(folder: Path) -> None:
    assert len(open_reader(folder)) == 12
    draw_image(0, 20, 20).save(folder / "cat" / "picture.png")
    assert len(open_reader(folder)) == 1


def test_beton_files_hold_one_or_three(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, f"{folder}.beton", "--channels", 6) == 2
    assert "use --format mds" in capsys.readouterr().err


def test_memory_counts_the_channels(shards: Path) -> None:
    six = estimate_memory(build_loader(shards, **OPTIONS)).batches
    reader = open_reader(shards)
    assert reader.max_pixels == 36 * 44
    shape = sum(group.count * np.prod(group.shape) for group in VIEWS)
    assert six > 6 * shape * OPTIONS["batch_size"]
