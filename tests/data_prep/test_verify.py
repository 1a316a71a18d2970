import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep import verify
from data_prep.publish.description import sha256
from pospre.data.stores.description import pack_sums
from pospre.errors import run_command
from tests.data_prep.reading import FORMATS, destination, sidecar
from tests.data_prep.reading import run as convert


@pytest.fixture
def make(tmp_path: Path, photos: Path) -> Callable[[str], Path]:
    """A function that converts the photos to a format."""

    def converted(data_format: str) -> Path:
        target = destination(tmp_path, data_format)
        assert convert(photos, target, "--verify") == 0
        return target

    return converted


def run(path: Path) -> int:
    return run_command(lambda: verify.main([str(path)]))


def data_file(target: Path) -> Path:
    return target / "shard.00000.mds" if target.is_dir() else target


@pytest.mark.parametrize("data_format", FORMATS)
def test_good_data_set(
    make: Callable[[str], Path], data_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(data_format)
    assert "ok: 12 decoded" in capsys.readouterr().out
    assert run(target) == 0
    assert "ok: 12 decoded" in capsys.readouterr().out


@pytest.mark.parametrize("data_format", FORMATS)
def test_one_changed_byte_is_found(
    make: Callable[[str], Path], data_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(data_format)
    data = bytearray(data_file(target).read_bytes())
    data[len(data) - 900] ^= 1
    data_file(target).write_bytes(data)
    assert run(target) == 2
    assert f"{data_file(target)} does not have the checksum" in capsys.readouterr().err


@pytest.mark.parametrize("data_format", FORMATS)
def test_truncated_and_missing_parts(
    make: Callable[[str], Path], data_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(data_format)
    whole = data_file(target).read_bytes()
    data_file(target).write_bytes(whole[:-100])
    assert run(target) == 2
    assert str(data_file(target)) in capsys.readouterr().err
    data_file(target).write_bytes(whole)
    sidecar(target).unlink()
    assert run(target) == 2
    assert "is missing" in capsys.readouterr().err
    assert run(target.parent / "nowhere") == 2


@pytest.mark.parametrize("data_format", FORMATS)
def test_an_image_that_does_not_decode_is_named(
    make: Callable[[str], Path], data_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(data_format)
    data = data_file(target).read_bytes()
    at = data.rindex(b"\xff\xd8\xff")
    data_file(target).write_bytes(data[:at] + b"\0" * 60 + data[at + 60 :])
    content = json.loads(sidecar(target).read_text())
    if data_format == "ffcv":
        content["sha256"] = sha256(target)
    else:
        content["manifest"]["shard.00000.mds"][1] = sha256(data_file(target))
    sidecar(target).write_text(json.dumps(content))
    assert run(target) == 2
    assert "1 of 12 samples cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("data_format", FORMATS)
def test_a_sample_with_another_checksum_is_named(
    make: Callable[[str], Path], data_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(data_format)
    content = json.loads(sidecar(target).read_text())
    sums = np.frombuffer(base64.b64decode(content["crc32c"]), "<u4").copy()
    sums[7] += 1
    sidecar(target).write_text(json.dumps({**content, "crc32c": pack_sums(sums.tolist())}))
    assert run(target) == 2
    message = capsys.readouterr().err
    assert "1 of 12 samples cannot be used" in message and "(crc32c)" in message


def test_a_folder_is_no_converted_data_set(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(photos) == 2
    assert "is a folder of images" in capsys.readouterr().err
