"""The same photographs as an image folder, an MDS directory and a .beton file."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.buckets import bucket, server, shards, store, upload  # noqa: F401 (fixtures)
from tests.data_prep.reading import converted, in_format

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
    return partial(in_format, photos)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``sharded(number, shard_mb)``: so many small pictures in MDS shards.

    The pictures lie beside them, in ``photos``.
    """

    @cache
    def make(number: int, shard_mb: float) -> Path:
        root = tmp_path_factory.mktemp("sharded")
        (root / "photos").mkdir()
        for name in range(number):
            picture(name).resize((24, 24)).save(root / f"photos/{name:03d}.jpg", quality=92)
        return converted(root / "photos", root / "mds", "--shard-mb", shard_mb)

    return make


@pytest.fixture(params=FORMATS)
def data_set(request: pytest.FixtureRequest, stored: Callable[[str], Path]) -> Path:
    """The photographs in each format in turn."""
    return stored(request.param)
