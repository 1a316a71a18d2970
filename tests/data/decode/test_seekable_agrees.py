"""Converted with --seekable: other bytes, the same batches to the bit, and parts left out."""

import io
import json
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch

from data_prep import convert
from pospre.data.decode import jpeg
from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from tests.libraries import needs_ffcv

VIEWS = (
    ViewGroup(name="small", count=1, size=16, scale=(0.05, 0.2)),
    ViewGroup(name="large", count=1, size=24, scale=(0.3, 1), interpolation="bilinear"),
)


@pytest.mark.parametrize("name", ["photos.beton", "photos_mds"])
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
    """Return ``seekable(name)``: the photographs with markers, as a .beton or a folder."""
    root = tmp_path_factory.mktemp("seekable")

    @cache
    def path(name: str) -> Path:
        data_format = "ffcv" if name.endswith(".beton") else "mds"
        if data_format == "ffcv":
            needs_ffcv()
        command = [str(photos), str(root / name), "--format", data_format, "--workers", "1"]
        with redirect_stdout(io.StringIO()) as said:
            assert convert.main([*command, "--seekable", "--verify"]) == 0
        assert "markers added" in said.getvalue()
        return root / name

    return path


def test_every_image_can_be_decoded_from_within(seekable):
    path = seekable("photos_mds")
    reader = open_reader(path)
    for index in range(len(reader)):
        encoded = reader.read(index).encoded
        assert jpeg.read_header(encoded.numpy().data).interval[1] in (8, 16)
    content = json.loads((path / "pospre.json").read_text())
    assert (content["kept"], content["marked"], content["encoded"]) == (0, len(reader), 0)
    assert content["made_from"]["settings"]["seekable"]


def test_images_encoded_anew_get_markers_too(photos, tmp_path):
    with redirect_stdout(io.StringIO()):
        command = [str(photos), str(tmp_path / "small"), "--format", "mds", "--max-side", "64"]
        assert convert.main([*command, "--seekable", "--workers", "1"]) == 0
    content = json.loads((tmp_path / "small/pospre.json").read_text())
    assert (content["marked"], content["encoded"]) == (0, content["samples"])
    reader = open_reader(tmp_path / "small")
    assert jpeg.read_header(reader.read(0).encoded.numpy().data).interval[1] == 16
