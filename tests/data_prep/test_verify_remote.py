"""Data sets in a bucket that are not what they say: verifying trusts nothing that is there."""

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pospre.data.stores.description import pack_sums
from tests.data_prep.bucket import URI, contents, shard, verified, write
from tests.data_prep.reading import Says


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
    for odd in ("../mine", "..", "", "/tmp/mine", "sub/mine", "a\0b"):
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


def test_a_bucket_that_is_away_may_be_there_later(
    stored: Any, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "1")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    said = refused(verified, code=69)
    assert "the S3 endpoint http://127.0.0.1:9 does not answer" in said


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
