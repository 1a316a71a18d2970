"""The same photographs as an image folder, an MDS directory and a .beton file."""

import contextlib
import functools
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import convert
from tests.data.buckets import bucket, server, shards, store, upload  # noqa: F401 (fixtures)
from tests.libraries import needs_ffcv

NUM_IMAGES = 22
CLASSES = ("ant", "bee", "cat")
FORMATS = ("folder", "mds", "ffcv")


def picture(number: int) -> Image.Image:
    """A smooth picture with some detail; every number has its own colours and size."""
    coarse = np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    size = (90 + 7 * (number % 5), 70 + 11 * (number % 4))
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of JPEGs in three classes, greyscale among them."""
    root = tmp_path_factory.mktemp("formats") / "photos"
    for number in range(NUM_IMAGES):
        path = root / CLASSES[number % len(CLASSES)] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = picture(number)
        (image.convert("L") if number == 5 else image).save(path, quality=92)
    return root


@pytest.fixture(scope="session")
def stored(photos: Path) -> Callable[[str], Path]:
    """Return ``stored(format)``: the photographs in a format; skips where FFCV cannot be loaded."""

    def path(data_format: str) -> Path:
        if data_format == "folder":
            return photos
        if data_format == "ffcv":
            needs_ffcv()
        target = photos.parent / ("photos.beton" if data_format == "ffcv" else "photos_mds")
        if not target.exists():
            command = [str(photos), str(target), "--format", data_format, "--workers", "1"]
            with contextlib.redirect_stdout(io.StringIO()):
                assert convert.main(command) == 0
        return target

    return path


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``sharded(number, shard_mb)``: so many small pictures in MDS shards.

    The pictures lie beside them, in ``photos``.
    """

    @functools.cache
    def make(number: int, shard_mb: float) -> Path:
        root = tmp_path_factory.mktemp("sharded")
        (root / "photos").mkdir()
        for name in range(number):
            picture(name).resize((24, 24)).save(root / f"photos/{name:03d}.jpg", quality=92)
        target = root / "mds"
        command = [str(root / "photos"), str(target), "--format", "mds", "--workers", "1"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert convert.main([*command, "--shard-mb", str(shard_mb)]) == 0
        return target

    return make


@pytest.fixture(params=FORMATS)
def data_set(request: pytest.FixtureRequest, stored: Callable[[str], Path]) -> Path:
    """The photographs in each format in turn."""
    return stored(request.param)
