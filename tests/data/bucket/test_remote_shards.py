"""MDS shards in a bucket: what arrives, and what is said when it does not."""

import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from pospre.data.bucket.checks import difference, unpack
from pospre.data.opening import open_reader
from pospre.data.stores.mds_index import FileEntry, read_index
from pospre.errors import UserError
from tests.data.buckets import ADDRESS, NUM_SAMPLES, check, open_remote, shard_gets
from tests.data.flaky_s3 import Fault, FlakyS3
from tests.processes import until
from tests.refusals import refuses


def test_samples_are_those_of_the_local_shards(bucket: Any, server: FlakyS3) -> None:
    reader = open_remote()
    assert (len(reader), reader.format) == (NUM_SAMPLES, "mds")
    assert reader.parts.tolist() == [8, 16, 24, 32, 40]
    assert shard_gets(server) == []
    check(reader)
    assert shard_gets(server) == [1] * 5
    assert reader.downloaded == sum(path.stat().st_size for path in reader.path.glob("*.mds"))
    assert reader.name(9) == "s3://bucket/set/shard.00001.mds, sample 1"
    reader.close()
    server.heal()
    again = open_remote()
    check(again)
    assert shard_gets(server) == [] and again.downloaded == 0


@pytest.mark.parametrize("options", [{"hashes": ["sha256"]}, {"compression": "zstd"}])
def test_shards_in_folders_as_merge_index_leaves_them(
    upload: Any, shards: Any, server: FlakyS3, options: dict[str, Any]
) -> None:
    source = shards(**options)
    client, index = upload(source), json.loads((source / "index.json").read_text())
    for number, entry in enumerate(index["shards"]):
        stored = (entry.get("zip_data") or entry["raw_data"])["basename"]
        body = (source / stored).read_bytes()
        client.put_object(Bucket="bucket", Key=f"set/part.{number}/{stored}", Body=body)
        client.delete_object(Bucket="bucket", Key=f"set/{stored}")
        for key in ("raw_data", "zip_data"):
            if entry.get(key):
                entry[key]["basename"] = f"part.{number}/{entry[key]['basename']}"
    body = json.dumps(index).encode()
    client.put_object(Bucket="bucket", Key="set/index.json", Body=body)
    reader = open_remote()
    check(reader)
    assert shard_gets(server) == [1] * 5
    assert reader.name(9).startswith("s3://bucket/set/part.1/shard.00001.mds")
    reader.close()
    server.heal()
    check(open_remote())
    assert shard_gets(server) == []


# What arrives


def test_an_index_that_is_replaced_by_a_shorter_one_while_it_comes(
    bucket: Any, server: FlakyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"Bucket": "bucket", "Key": "set/index.json"}
    index = bucket.get_object(**place)["Body"].read()
    longer = json.dumps(json.loads(index), indent=8).encode()
    bucket.put_object(**place, Body=longer)
    server.spoil("index.json", Fault(cut_after=len(longer) - 5))

    def replaced(*_: float) -> float:
        bucket.put_object(**place, Body=index)
        return 0.01

    monkeypatch.setattr("pospre.attempts._CHANCE.uniform", replaced)
    check(open_remote())


@pytest.mark.parametrize(
    "options",
    [
        {"hashes": ["sha256"]},  # as our converter writes them
        {"compression": "zstd", "hashes": ["xxh64"]},
        {"compression": "gz"},
    ],
    ids=["sha256", "zstd and xxh64", "gz"],
)
def test_damaged_shards_are_fetched_once_more(
    upload: Any, shards: Any, server: FlakyS3, options: dict[str, Any], tmp_path: Path
) -> None:
    source = shards(**options)
    upload(source)
    name = next(source.glob("shard.00001*")).name
    server.spoil(name, Fault(flip=True))
    reader = open_remote()
    check(reader)
    assert {path.suffix for path in reader.path.glob("shard*")} == {".mds"}
    assert server.gets[name] == 2
    server.spoil_always(name, Fault(flip=True))
    reader = open_remote(cache_dir=tmp_path / "other")
    refuses(f"{ADDRESS}/{name} does not match .* downloaded twice", lambda: reader.read(9))
    check(reader, [0, 39])
    assert not list(reader.path.glob("shard.00001*"))


@pytest.mark.parametrize("compression", ["br:1", "bz2", "gz", "snappy", "zstd:3"])
def test_a_shard_is_unpacked_into_its_recorded_size_and_no_more(
    shards: Any, tmp_path: Path, compression: str
) -> None:
    streaming = pytest.importorskip("streaming.base.compression")
    source = shards(compression=compression)
    for entry in read_index(source, ""):
        path, content = tmp_path / entry.raw.name, (source / entry.stored.name).read_bytes()
        path.write_bytes(content)
        assert unpack(path, entry) == ""
        assert path.read_bytes() == streaming.decompress(compression, content)
    bomb = streaming.compress(compression, bytes(100 << 20))
    path.write_bytes(bomb)
    packed = FileEntry(basename="z", bytes=len(bomb))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = unpack(path, entry.model_copy(update={"packed": packed}))
    assert f"cannot be decompressed into {entry.raw.size} bytes" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
    other = entry.model_copy(update={"packed": packed, "compression": "zip"})
    assert "'zip' is none of br, bz2," in unpack(path, other)
    short = streaming.compress(compression, b"short")
    path.write_bytes(short)
    packed = FileEntry(basename="z", bytes=len(short))
    said = unpack(path, entry.model_copy(update={"packed": packed}))
    assert said == f"it has 5 bytes instead of {entry.raw.size}"


def test_hashes_are_those_of_streaming(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming.base.hashing")
    path, content = tmp_path / "shard", random.Random(0).randbytes(70_000)
    path.write_bytes(content)
    wrong = {}
    for name in streaming.get_hashes():
        hashes = {name: streaming.get_hash(name, content)}
        assert difference(path, FileEntry(basename="s", bytes=len(content), hashes=hashes)) == ""
        wrong[name] = f"its {name} differs"
    assert {"sha256", "xxh64", "xxh3_128"} <= wrong.keys()
    wrong |= {name: f"its {name} cannot be computed" for name in ("shake_128", "md", "__name__")}
    for name, said in wrong.items():
        entry = FileEntry(basename="s", bytes=len(content), hashes={name: "00"})
        assert difference(path, entry).startswith(said)


def test_a_shard_that_is_longer_than_recorded_does_not_fill_the_disk(
    bucket: Any, server: FlakyS3
) -> None:
    name, size = "shard.00001.mds", bucket.get_object(Bucket="bucket", Key="set/shard.00001.mds")
    reader = open_remote()
    bucket.put_object(Bucket="bucket", Key=f"set/{name}", Body=size["Body"].read() + bytes(1 << 20))
    server.is_tagless = True  # so only its length is wrong
    refuses(rf"{name} .*has more than {size['ContentLength']} bytes", lambda: reader.read(9))
    assert server.gets[name] == 2 and not list(reader.path.glob(f"{name}*"))


@pytest.mark.parametrize("may_list", [True, False])
def test_other_shards_under_the_same_names_are_fetched(
    bucket: Any, server: FlakyS3, may_list: bool
) -> None:
    """An index without hashes stays the same if the shards are replaced."""
    if not may_list:
        server.spoil_always("bucket", Fault(status=403))
    old, name = open_remote(), "shard.00003.mds"
    check(old)
    check(same := open_remote())
    assert shard_gets(server) == [1] * 5 and same.path == old.path
    late = open_remote(cache_dir=old.path.parent / "other")
    content = bytearray((old.path / name).read_bytes())
    content[-3000] ^= 255  # of the last image
    bucket.put_object(Bucket="bucket", Key=f"set/{name}", Body=bytes(content))
    new = open_remote()
    assert new.path != old.path
    check(new, range(31))
    assert new.read(31).encoded.tolist() != old.read(31).encoded.tolist()
    check(old)
    check(late, range(24))
    refuses(rf"{name}: .* has been replaced .* start the run again", lambda: late.read(31))


def test_shards_with_hashes_are_known_by_these(upload: Any, shards: Any, server: FlakyS3) -> None:
    client = upload(shards(hashes=["sha1"]))
    check(open_remote())
    place = {"Bucket": "bucket", "Key": "set/shard.00003.mds"}
    parts = client.create_multipart_upload(**place)["UploadId"]
    body = client.get_object(**place)["Body"].read()
    part = client.upload_part(**place, UploadId=parts, PartNumber=1, Body=body)
    done = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(**place, UploadId=parts, MultipartUpload=done)
    check(open_remote())  # the same content, with another ETag
    assert shard_gets(server) == [1] * 5


def test_shards_of_another_size_or_name_are_refused(
    bucket: Any, upload: Any, shards: Any, tmp_path: Path
) -> None:
    bucket.put_object(Bucket="bucket", Key="set/shard.00002.mds", Body=b"cut")
    refuses(r"set/shard.00002.mds has 3 bytes instead of", open_remote)
    bucket.delete_object(Bucket="bucket", Key="set/shard.00002.mds")
    refuses(r"set/shard.00002.mds is missing", open_remote)
    index = json.loads((shards() / "index.json").read_text())
    for name in ("../../outside.mds", "..", "", "a\0b", "/a", "a//b", "a/../../b"):
        index["shards"][0]["raw_data"]["basename"] = name
        bucket.put_object(Bucket="bucket", Key="set/index.json", Body=json.dumps(index).encode())
        refuses(r"without a valid 'raw_data'", open_remote)


# Faults of the network


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(status=503)] * 3,
        [Fault(status=500), Fault(status=429)],
        [Fault(cut_after=0), Fault(cut_after=10_000)],
        [Fault(pause=2.0)],
    ],
    ids=["503", "500 and 429", "cut", "silent"],
)
def test_faults_that_pass(
    bucket: Any, server: FlakyS3, faults: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "6")  # which makes 1.5 s a long silence
    reader = open_remote()
    server.spoil("shard.00001.mds", *faults)
    check(reader, range(8, 16))
    assert server.gets["shard.00001.mds"] == len(faults) + 1
    if faults[-1].cut_after:  # what came before the cut is not sent again
        size = (reader.path / "shard.00001.mds").stat().st_size
        until(lambda: server.sent["shard.00001.mds"] == size)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            Fault(status=503),
            r"gave up after \d+ attempts in \d+ s \(POSPRE_S3_PATIENCE .*; .* answered 503",
        ),
        (Fault(cut_after=500), r"the connection was cut after \d+ bytes"),
        (Fault(pause=30), r"the server was silent|received in \d attempts"),
        (Fault(drip=0.3), r"\d+ of \d+ bytes received in 1 attempts|the server .* was too slow"),
    ],
    ids=["503", "cut", "silent", "drip"],
)
def test_waiting_is_bounded(
    bucket: Any, server: FlakyS3, fault: Fault, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "3")
    monkeypatch.setenv("RANK", "3")
    # The pauses come to 1.5 s: giving up does not race with the reader, which waits for 3 s.
    monkeypatch.setattr("pospre.attempts._CHANCE.uniform", lambda low, high: high)
    reader = open_remote()
    server.spoil_always("shard.00001.mds", fault)
    start = time.monotonic()
    whole = rf"rank 3 waited \d\.\d s for shard {ADDRESS}/shard.00001.mds: .*({said})"
    with pytest.raises(UserError, match=whole) as caught:
        reader.read(9)
    assert time.monotonic() - start < 30 and "secret-of-nobody" not in str(caught.value)
    server.heal()
    start = time.monotonic()
    reader.close()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("status", "said"), [(403, "access is denied"), (404, "does not exist"), (400, "answers")]
)
def test_faults_that_stay_are_said_at_once(
    bucket: Any, server: FlakyS3, status: int, said: str
) -> None:
    reader = open_remote()
    server.spoil_always("shard.00001.mds", Fault(status=status))
    refuses(rf"{ADDRESS}/shard.00001.mds.*{said}", lambda: reader.read(9))
    assert server.gets["shard.00001.mds"] == 1
    check(reader, [0, 39])


def test_a_long_description_may_take_its_time(
    bucket: Any, server: FlakyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pospre.data.bucket.reader._OPENING_SILENCE", 0.5)
    server.spoil_always("index.json", Fault(drip=1.0))
    open_remote()
    server.spoil_always("index.json", Fault(pause=5.0))
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "6")
    refuses(r"gave up after . attempts in [12] s.*was silent", open_remote)


def test_opening_says_what_is_missing(
    bucket: Any, server: FlakyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.spoil_always("pospre.json", Fault(status=403))  # of a bucket that may not be listed
    assert len(open_remote()) == NUM_SAMPLES
    refuses(
        r"set/none/index.json does not exist .* not a folder of MDS",
        lambda: open_reader(f"{ADDRESS}/none"),
    )
    refuses(r"bucket 'nowhere' does not exist", lambda: open_reader("s3://nowhere/set"))
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "soon")
    refuses(r"POSPRE_S3_PATIENCE is 'soon'", open_remote)
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "1")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://me:secret-of-nobody@127.0.0.1:9")
    refuses(r"the S3 endpoint http://127.0.0.1:9 does not answer", open_remote)
