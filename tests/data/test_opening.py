"""Paths that are no data set name the remedy; names of samples by a public call."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("streaming")
from streaming import MDSWriter
from streaming.base.util import merge_index

from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from tests.data_prep.reading import in_format
from tests.data_prep.sample_images import encoded, picture
from tests.refusals import refuses

PATTERN = "a pattern; give the folder of images itself: .*/photos$"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("photos.zip", "an archive, .*convert it with `python -m data_prep.convert [^:]*s.zip"),
        ("photos.tar", "an archive, .* or unpack it and give the folder"),
        ("photos.tar.gz", r"an archive, .*unpack it \(tar -xf\) and give the folder"),
        ("photos.parquet", "a table, .*convert it with `python"),
        *((f"photos/{name}", PATTERN) for name in ("*.png", "cat[0-9]/a?.png", "cat[0-9]")),
    ],
)
def test_archives_and_patterns_name_the_remedy(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for given in (tmp_path / path, f"s3://bucket/{path}"):
        if isinstance(given, Path) or said != PATTERN:
            words = f"^{re.escape(str(given))} is {said}"
            refuses(words, partial(open_reader, given), tmp_path)


def test_a_folder_may_have_such_a_name(image_folder: Callable[..., Path]) -> None:
    assert len(open_reader(image_folder(num_images=4, name="photos [new].zip"))) == 4


@pytest.mark.parametrize("storage", ["folder", "mds", "ffcv"])
def test_the_file_of_a_sample_has_a_public_call(
    storage: str, image_folder: Callable[..., Path]
) -> None:
    folder = image_folder(num_images=4)
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.jpg"))]
    path = in_format(folder, storage)
    loader = build_loader(path, views=[ViewGroup(size=16)], batch_size=2, num_workers=0)
    for index in next(iter(loader))["index"].tolist():
        assert loader.file_name(index) == ("" if storage == "ffcv" else names[index])


def test_shards_of_merge_index_are_read(tmp_path: Path) -> None:
    """Streaming's parallel writers leave them in folders."""
    images = [encoded(picture(number)) for number in range(6)]
    for part in range(2):
        folder = tmp_path / "mds" / f"part.{part:05d}"
        columns = {"image": "bytes", "label": "int"}
        with MDSWriter(out=str(folder), columns=columns) as out:
            for number in range(3 * part, 3 * part + 3):
                out.write({"image": images[number], "label": number})
    merge_index(str(tmp_path / "mds"), keep_local=True)
    listed = json.loads((tmp_path / "mds" / "index.json").read_text())["shards"]
    assert listed[1]["raw_data"]["basename"] == "part.00001/shard.00000.mds"
    reader = open_reader(tmp_path / "mds")
    samples = [reader.read(index) for index in range(len(reader))]
    assert [sample.label for sample in samples] == [*range(6)]
    assert [sample.encoded.numpy().tobytes() for sample in samples] == images
