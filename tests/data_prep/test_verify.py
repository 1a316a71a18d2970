import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import verify
from data_prep.publish.description import sha256
from pospre.data.stores.description import pack_sums
from pospre.errors import run_command
from tests.data_prep.bucket import URI, contents, shard, verified, write
from tests.data_prep.reading import FORMATS, Says, destination, sidecar
from tests.data_prep.reading import run as convert
from tests.disk import flip


@pytest.fixture(params=FORMATS)
def target(request: pytest.FixtureRequest, tmp_path: Path, photos: Path, printed: Says) -> Path:
    """The photos in a format."""
    made = destination(tmp_path, request.param)
    assert "ok: 12 decoded" in printed(convert, photos, made, "--verify")
    return made


@pytest.fixture
def data(target: Path) -> Path:
    """The file that holds them."""
    return target / "shard.00000.mds" if target.is_dir() else target


def run(path: Path) -> int:
    return run_command(lambda: verify.main([str(path)]))


def test_one_changed_byte_is_found(target: Path, data: Path, refused: Says, printed: Says) -> None:
    assert "ok: 12 decoded" in printed(run, target)
    flip(data, -900)
    assert f"{data} does not have the checksum" in refused(run, target)


def test_truncated_and_missing_parts(target: Path, data: Path, refused: Says) -> None:
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    assert str(data) in refused(run, target)
    data.write_bytes(whole)
    sidecar(target).unlink()
    assert "is missing" in refused(run, target)
    assert run(target.parent / "nowhere") == 2


def test_an_image_that_does_not_decode_is_named(target: Path, data: Path, refused: Says) -> None:
    whole = data.read_bytes()
    at = whole.rindex(b"\xff\xd8\xff")
    data.write_bytes(whole[:at] + b"\0" * 60 + whole[at + 60 :])
    content = json.loads(sidecar(target).read_text())
    if target.is_dir():
        content["manifest"][data.name][1] = sha256(data)
    else:
        content["sha256"] = sha256(data)
    sidecar(target).write_text(json.dumps(content))
    assert "1 of 12 samples cannot be used" in refused(run, target)


def test_a_sample_with_another_checksum_is_named(target: Path, refused: Says) -> None:
    content = json.loads(sidecar(target).read_text())
    sums = np.frombuffer(base64.b64decode(content["crc32c"]), "<u4").copy()
    sums[7] += 1
    sidecar(target).write_text(json.dumps({**content, "crc32c": pack_sums(sums.tolist())}))
    message = refused(run, target)
    assert "1 of 12 samples cannot be used" in message and "(crc32c)" in message


# Data sets in a bucket that are not what they say: verifying trusts nothing that is there


@pytest.fixture
def stored(bucket: Any, photos: Path) -> Any:
    assert write(photos, URI) == 0
    return bucket


def put(bucket: Any, name: str, content: Any) -> None:
    bucket.put_object(Bucket="bucket", Key=f"photos/{name}", Body=json.dumps(content).encode())


def test_nothing_is_written_outside_of_the_temporary_folder(stored: Any, refused: Says) -> None:
    mine = Path(tempfile.gettempdir()) / "mine"
    mine.write_text("kept")
    stored.put_object(Bucket="bucket", Key="photos/../mine", Body=b"evil")
    name, texts = shard(stored, 0), [contents(stored)[f"{n}.json"] for n in ("index", "pospre")]
    for odd in ("../mine", "..", "", "/tmp/mine", "sub/../../mine", "a\0b"):
        index, content = map(json.loads, texts)
        (entry,) = (e["raw_data"] for e in index["shards"] if e["raw_data"]["basename"] == name)
        entry["basename"] = odd
        content["manifest"][odd] = content["manifest"].pop(name)
        put(stored, "index.json", index)
        put(stored, "pospre.json", content)
        said = f"{URI}/index.json describes a shard without a valid 'raw_data'"
        assert said in refused(verified)
        assert mine.read_text() == "kept" and list(mine.parent.iterdir()) == [mine]
    stored.delete_object(Bucket="bucket", Key="photos/../mine")


def test_damaged_descriptions(stored: Any, refused: Says) -> None:
    content = json.loads(contents(stored)["pospre.json"])
    sums = np.frombuffer(base64.b64decode(content["crc32c"]), "<u4")[:5]
    put(stored, "pospre.json", {**content, "crc32c": pack_sums(sums.tolist())})
    assert "crc32c does not have a checksum for each sample" in refused(verified)
    broken: Any
    for broken in ([], {}, {**content, "manifest": {"x": 1}}, {**content, "manifest": {}}):
        put(stored, "pospre.json", broken)
        assert f"{URI}/pospre.json" in refused(verified)
    put(stored, "pospre.json", content)
    for broken in ([], {}, {"version": 2, "shards": [3]}):
        put(stored, "index.json", broken)
        assert f"{URI}/index.json" in refused(verified)
