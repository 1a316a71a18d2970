"""Converted with --seekable: other bytes, the same batches to the bit, and parts left out."""

from functools import cache
from pathlib import Path

import pytest
import torch

from pospre.data.decode import jpeg
from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from tests.data_prep.reading import FORMATS, converted, description, destination, run

VIEWS = (
    ViewGroup(name="small", count=1, size=16, scale=(0.05, 0.2)),
    ViewGroup(name="large", count=1, size=24, scale=(0.3, 1), interpolation="bilinear"),
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("views", [VIEWS[:1], VIEWS])
@pytest.mark.parametrize("tolerance", [0, 10])
def test_batches_are_those_of_the_files(photos, seekable, name, views, tolerance):
    options = {"views": views, "batch_size": 3, "seed": 1, "num_workers": 0, "shuffle": False}
    found = build_loader(seekable(name), **options, tolerance=tolerance)
    expected = build_loader(photos, **options, tolerance=tolerance)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.fixture(scope="module")
def seekable(photos, tmp_path_factory):
    """Return ``seekable(format)``: the photographs with markers."""
    root = tmp_path_factory.mktemp("seekable")

    @cache
    def path(name: str) -> Path:
        return converted(photos, destination(root, name), "--seekable", "--verify")

    return path


def test_every_image_can_be_decoded_from_within(seekable):
    path = seekable("mds")
    reader = open_reader(path)
    for index in range(len(reader)):
        encoded = reader.read(index).encoded
        assert jpeg.read_header(encoded.numpy().data).interval[1] in (8, 16)
    content = description(path)
    assert (content["kept"], content["marked"], content["encoded"]) == (0, len(reader), 0)
    assert content["made_from"]["settings"]["seekable"]


def test_images_encoded_anew_get_markers_too(photos, tmp_path):
    small = converted(photos, tmp_path / "small", "--max-side", 64, "--seekable")
    content = description(small)
    assert (content["marked"], content["encoded"]) == (0, content["samples"])
    reader = open_reader(small)
    assert jpeg.read_header(reader.read(0).encoded.numpy().data).interval[1] == 16


def test_the_summary_counts_them(photos, tmp_path, capsys):
    assert run(photos, tmp_path / "marked", "--seekable") == 0
    assert "markers added" in capsys.readouterr().out
