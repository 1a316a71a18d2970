"""Files that take long, or that a worker dies of: each is named."""

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest

from data_prep.distribute import activity, worker
from data_prep.encode.images import PreparedImage, prepare_image
from tests.data_prep.reading import description, run
from tests.data_prep.sample_images import encoded, picture, write_files

BAD = b"II*\0 bad"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_takes_long_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def slow(data: bytes, *args: object, **kwargs: object) -> PreparedImage:
        time.sleep(0.6 if data == BAD else 0)
        return prepare_image(data, None, 90)

    monkeypatch.setattr(worker, "prepare_image", slow)
    monkeypatch.setattr(activity, "_FIRST_NOTICE", 0.2)
    monkeypatch.setattr(activity, "_LOOK_EVERY", 0.05)
    files = {f"a/{n}.jpg": encoded(picture(n)) for n in range(4)} | {"a/slow.tif": BAD}
    source = write_files(tmp_path / "photos", files)
    assert run(source, tmp_path / "mds", "--shard-mb", "0.001", workers=workers) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("still at")]
    assert 1 <= len(lines) <= 3 and all(str(source / "a/slow.tif") in line for line in lines)
    assert [item["path"] for item in description(tmp_path / "mds")["skipped"]] == ["a/slow.tif"]


def test_the_file_that_a_worker_dies_of_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadly(data: bytes, *args: object, **kwargs: object) -> PreparedImage:
        if data == BAD:
            faulthandler.disable()  # pytest's, which would tell more than anyone wants
            os.kill(os.getpid(), signal.SIGSEGV)
        return prepare_image(data, None, 90)

    monkeypatch.setattr(worker, "prepare_image", deadly)
    files = {f"a/{n}.jpg": encoded(picture(n)) for n in range(6)} | {"a/deadly.tif": BAD}
    source = write_files(tmp_path / "photos", files)
    assert run(source, tmp_path / "mds", "--shard-mb", "0.001", workers=2) == 2
    message = capfd.readouterr().err
    assert f"a worker process died (SIGSEGV at {source / 'a/deadly.tif'})" in message
    assert "remove the file" in message
