"""Names of files, classes and lists that a terminal would obey, or that are no Unicode."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from data_prep import statistics, verify
from data_prep.distribute.activity import Activity, at
from data_prep.sources.registry import open_source
from pospre.data.loader import build_loader
from pospre.errors import UserError, run_command
from tests.data_prep.reading import run
from tests.data_prep.sample_images import encoded, picture, write_files

ESCAPE = "\x1b[2Jx"
NO_UTF8 = os.fsdecode(b"\xfe")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    good = [f"a{ESCAPE}/1.jpg", f"a{ESCAPE}/2{ESCAPE}{NO_UTF8}.jpg", f"b{NO_UTF8}/3.jpg"]
    files = {name: encoded(picture(number)) for number, name in enumerate(good)}
    files[f"a{ESCAPE}/bad{ESCAPE}{NO_UTF8}.jpg"] = b"no image"
    files[f"a{ESCAPE}/note{ESCAPE}.txt"] = b"text"
    try:
        return write_files(tmp_path / "photos", files)
    except OSError:
        pytest.skip("this file system refuses such names")


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """Return what both streams will have printed, in an encoding as strict as a terminal's."""
    printed = io.BytesIO()
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(printed, encoding="utf-8", write_through=True)
        monkeypatch.setattr(sys, name, stream)
    return printed


def test_every_command_prints_them_as_escapes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = terminal(monkeypatch)
    target = tmp_path / "out"
    plot = tmp_path / "plot.png"
    commands: list[Any] = [
        lambda: run(root, target),
        lambda: run(root, target),  # finds that it is there
        lambda: run_command(lambda: verify.main([str(target)])),
        lambda: run_command(lambda: statistics.main([str(target), "--picture", str(plot)])),
        lambda: run_command(lambda: statistics.main([str(root)])),
    ]
    assert [command() for command in commands] == [0] * len(commands)
    assert run(root, tmp_path / "strict", "--strict") == 2
    said = printed.getvalue()
    assert b"\x1b" not in said and rb"bad\x1b[2Jx\udcfe.jpg" in said
    assert b"already holds this conversion" in said and b"verified" in said


def test_a_sample_that_training_leaves_out_is_named_safely(root: Path) -> None:
    with pytest.raises(UserError) as caught:
        list(build_loader(root, batch_size=2, num_workers=0))
    assert r"bad\x1b[2Jx\udcfe.jpg cannot be decoded" in str(caught.value)


def test_a_worker_at_such_a_file_is_named_safely() -> None:
    activity = Activity(1)
    activity.join()
    with at(f"c{ESCAPE}{NO_UTF8}.jpg"):
        assert activity._rows[0].text == r"c\x1b[2Jx\udcfe.jpg"


def inaturalist(root: Path, name: str, category: str) -> Path:
    """An iNaturalist whose list is written as JSON escapes."""
    about = {
        "categories": [{"id": 1, "name": category}],
        "images": [{"id": 1, "file_name": f"birds/{name}"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1}],
    }
    files = {"train.json": json.dumps(about).encode(), "birds/a.jpg": encoded(picture())}
    return write_files(root, files)


def test_a_list_that_names_what_can_be_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"lists a file .*\\ud800\.jpg, which is not a valid file name"
    ):
        open_source(inaturalist(tmp_path / "list", "\ud800.jpg", "cat"), split="train")


def test_a_class_whose_name_is_no_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    target = tmp_path / "out"
    source = inaturalist(tmp_path / "list", "a.jpg", "\ud800")
    assert run(source, target, "--split", "train") == 0
    assert run_command(lambda: verify.main([str(target)])) == 0
