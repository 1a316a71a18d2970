"""Conversion, training and leases on SeaweedFS: a real server forgives less than moto does."""

import io
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_prep.publish.bucket import BucketShards
from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.object_store import Bucket
from pospre.run import lease as leasing
from pospre.run.checkpoints.folders import checkpoints_in
from pospre.run.checkpoints.uploads import Uploads
from pospre.run.lease import LEASE, lease
from tests.data.flaky_s3 import keys, use_bucket
from tests.data.seaweed import NO_WEED, Seaweed, seaweed, weed
from tests.data_prep.bucket import URI, verified, write
from tests.data_prep.conftest import photos as photos
from tests.data_prep.conftest import printed as printed
from tests.data_prep.conftest import refused as refused
from tests.data_prep.reading import Says
from tests.training.conftest import run as run
from tests.training.conftest import tiny as tiny
from tests.training.tiny_runs import SHORT, Run, curve

REMOTE = "s3://bucket/runs/tiny"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    if weed() is None:
        pytest.skip(NO_WEED)
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        yield running


@pytest.fixture(autouse=True)
def client(server: Seaweed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Lead a test to the server, with an empty bucket ``bucket``; give a client."""
    use_bucket(monkeypatch, server.url, patience=60)
    monkeypatch.setenv("POSPRE_CACHE", str(tmp_path / "cache"))
    yield server.client
    Bucket("s3://bucket").remove(list(_all(server.client)))


def _all(client: Any) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


@pytest.mark.parametrize("address", ["s3://bucket", URI, f"{URI}/deep/down"])
def test_a_conversion_is_whole_is_replaced_and_is_read(
    client: Any, photos: Path, printed: Says, address: str
) -> None:
    if address == URI:  # as consoles make folders
        client.put_object(Bucket="bucket", Key="photos/", Body=b"")
    assert write(photos, address) == 0
    assert "already holds this conversion" in printed(write, photos, address)
    old = {name for name in Bucket(address).list() if name.endswith(".mds")}
    assert write(photos, address, "--quality", 50, "--overwrite", "--max-side", 40) == 0
    assert len(old) > 1 and not old & Bucket(address).list().keys()
    reader = open_reader(address)
    assert sum(reader.read(index).label for index in range(len(reader))) == 6
    reader.close()
    assert not [name for name in Bucket(address).list(below=True) if name.startswith(".pospre")]
    if address == URI:
        assert verified() == 0


def test_an_interrupted_conversion_goes_on(
    photos: Path, monkeypatch: pytest.MonkeyPatch, refused: Says, printed: Says
) -> None:
    keep = BucketShards.keep
    kept: list[Any] = []

    def stop_at_the_second(self: BucketShards, *arguments: Any) -> None:
        if len(kept) == 1:
            raise KeyboardInterrupt
        keep(self, *arguments)
        kept.append(arguments)

    with monkeypatch.context() as patch:
        patch.setattr(BucketShards, "keep", stop_at_the_second)
        assert "1 of " in refused(write, photos, URI, code=130)
    assert "index.json" not in Bucket(URI).list()
    assert "1 of " in printed(write, photos, URI)
    assert verified() == 0


def test_a_run_trains_from_shards_saves_and_resumes_elsewhere(
    client: Any, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(tmp_path / "images", URI) == 0
    offer = Uploads.offer

    def offer_and_wait(self: Uploads, checkpoint: Path) -> None:
        """Skip none, as a bucket that is slower than the run saves would."""
        offer(self, checkpoint)
        assert self.finish() is None

    monkeypatch.setattr(Uploads, "offer", offer_and_wait)
    options = (*SHORT, f"data.path={URI}", f"trainer.save_folder={REMOTE}")
    code, said = run(tiny, *options, "trainer.keep_remote=2")
    assert code == 0, said
    whole = curve(tmp_path / "runs" / "tiny")
    assert [found.batch for found in checkpoints_in(REMOTE)] == [6, 4]
    assert LEASE not in keys(client, "runs/tiny/")
    # as if it had been killed in its last upload, and its disk been lost
    client.delete_object(Bucket="bucket", Key="runs/tiny/ep1-ba6/manifest.json")
    shutil.rmtree(tmp_path / "runs")
    code, said = run(tiny, *options)
    assert code == 0 and f"resuming from {REMOTE}/ep1-ba4" in said
    assert curve(tmp_path / "runs" / "tiny") == whole
    assert checkpoints_in(REMOTE)[0].batch == 6


def test_a_lease_keeps_runs_apart_and_expires(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leasing, "EXPIRES", 1.0)
    monkeypatch.setattr(leasing, "_RENEWED", 0.1)
    monkeypatch.setattr(leasing, "_LOOK", 0.05)
    with lease(REMOTE):
        with pytest.raises(UserError, match="in use by another run"), lease(REMOTE):
            pass
        monkeypatch.setattr(leasing._Lease, "_wait_for_death", lambda self, found: None)
        with pytest.raises(UserError, match="in use by another run"), lease(REMOTE):
            pass  # at the same moment
    monkeypatch.undo()
    use_bucket(monkeypatch, client.meta.endpoint_url)
    monkeypatch.setattr(leasing, "EXPIRES", 0.3)
    client.put_object(Bucket="bucket", Key=f"runs/tiny/{LEASE}", Body=b'{"machine": "another"}')
    with lease(REMOTE):
        pass
    captured = capsys.readouterr()
    assert "waiting 0.3 s" in captured.out and "ignores conditional" not in captured.err


def test_large_objects_and_long_lists(client: Any) -> None:
    large = bytes(range(256)) * (9 << 12)  # 9 MiB: two parts
    with Bucket(URI) as bucket:
        bucket.upload("large", io.BytesIO(large), lambda _: None)
        assert bucket.fetch("large") == large
        names = [f"n{number:04d}" for number in range(1001)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: bucket.put(f"many/{name}", b"x"), names))
        assert list(bucket.list("many")) == names
        bucket.remove([f"many/{name}" for name in names])
        assert not bucket.list("many") and bucket.find("many/n0001") is None
        bucket.delete("many/n0001")  # which has gone


@pytest.mark.parametrize(
    ("variables", "address", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "x"}, URI, "access is denied"),
        ({}, "s3://nowhere/photos", "bucket 'nowhere' does not exist"),
        ({"AWS_ACCESS_KEY_ID": "someone"}, URI, "refuses the credentials"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, URI, "refuses the credentials"),
    ],
)
def test_what_is_wrong_is_said_at_the_first_answer(
    tiny: Path,
    photos: Path,
    run: Run,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    address: str,
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    assert write(photos, address) == 2 and says in capfd.readouterr().err
    is_reader = variables.get("AWS_ACCESS_KEY_ID") == "reader"
    for key in ("data.path", *(() if is_reader else ("trainer.save_folder",))):
        code, said = run(tiny, f"{key}={address}")
        assert code == 2 and ("is not a folder of MDS" if is_reader else says) in said
    assert time.monotonic() - start < 10
