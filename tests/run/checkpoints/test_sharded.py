"""Checkpoints in shards: the same content, on any number of ranks; nothing in them is executed."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from pospre.object_store import Bucket
from pospre.run.checkpoints import reading
from pospre.run.checkpoints.file import DamagedCheckpoint
from pospre.run.checkpoints.finding import checkpoints_in
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.checkpoints.uploads import Uploads, files_of, lacks
from pospre.training.trained import load_model
from tests.data.flaky_s3 import FlakyS3, flaky_s3, use_bucket
from tests.processes import finished, launcher, until
from tests.run.checkpoints.hostile import Global, with_state
from tests.run.checkpoints.test_damage import Payload
from tests.run.checkpoints.test_saver import full_disk
from tests.training.tiny_runs import MAE, SHORT, Run, curve, environment, flat

MAE_RUN = (*SHORT, MAE)
SHARDED = (*MAE_RUN, "trainer.checkpoint=sharded")


@pytest.fixture
def whole(tiny: Path, run: Run, tmp_path: Path) -> Path:
    """Return the folder of a run with checkpoints in files."""
    assert run(tiny, *MAE_RUN, "run_name=whole")[0] == 0
    return tmp_path / "runs" / "whole"


@pytest.fixture
def folder(tiny: Path, run: Run, tmp_path: Path) -> Path:
    """Return the checkpoints of a run in shards that was killed after its fifth step."""
    assert run(tiny, *SHARDED)[0] == 0
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["ep0-ba2", "ep1-ba4", "ep1-ba6"]
    shutil.rmtree(folder / "ep1-ba6")
    return folder


def test_shards_hold_what_a_file_holds(folder: Path, whole: Path, tiny: Path, run: Run) -> None:
    shards = read_checkpoint(str(folder / "ep1-ba4")).content
    file = read_checkpoint(str(whole / "checkpoints" / "ep1-ba4.pt")).content
    for key in ("model", "optimizers", "schedulers", "timestamp"):
        assert flat(shards["state"][key]).keys() == flat(file["state"][key]).keys()
    assert flat(shards["state"]["model"]) == flat(file["state"]["model"])
    assert flat(shards["state"]["optimizers"]) == flat(file["state"]["optimizers"])
    assert flat(shards["rng"][0]["torch"]) == flat(file["rng"][0]["torch"])
    noted = json.loads((folder / "ep1-ba4" / "manifest.json").read_text())
    assert noted["versions"] == shards["versions"]
    names = {item["file"] for item in noted["files"]}
    assert names | {"manifest.json"} == {path.name for path in (folder / "ep1-ba4").iterdir()}
    # whoever reads checkpoints reads these
    ours, theirs = (load_model(str(place))[0].state_dict() for place in (folder.parent, whole))
    assert load_model(str(folder / "ep1-ba4"))[1].run_name == "tiny"
    assert ours.keys() == theirs.keys()
    # a run goes on from either kind with either kind
    for option, path in (("sharded", "ep1-ba4"), ("whole", "ep1-ba4"), ("sharded", "ep1-ba6.pt")):
        if path == "ep1-ba4":
            shutil.rmtree(folder / "ep1-ba6", ignore_errors=True)
        longer = "trainer.max_duration=8ba" if path == "ep1-ba6.pt" else SHORT[0]
        code, said = run(tiny, *SHARDED, f"trainer.checkpoint={option}", longer)
        assert code == 0 and f"going on from {folder}/{path}\n" in said, said
        assert curve(folder.parent)[:6] == curve(whole)
    assert (folder / "ep2-ba8" / "manifest.json").exists() and (folder / "ep1-ba6.pt").exists()


def forge(folder: Path, name: str, content: bytes) -> None:
    """Put other content into a checkpoint's file, and make the manifest fit."""
    (folder / name).write_bytes(content)
    manifest = folder / "manifest.json"
    noted = json.loads(manifest.read_text())
    for item in noted["files"]:
        if item["file"] == name:
            item |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(noted))


def test_what_is_damaged_is_passed_over(
    folder: Path, whole: Path, tiny: Path, run: Run, tmp_path: Path, capfd: Any
) -> None:
    newest, good = folder / "ep1-ba4", tmp_path / "good"
    shutil.copytree(newest, good)
    shard = next(path.name for path in newest.glob("*.distcp"))

    def flipped(name: str, share: float) -> None:
        content = bytearray((newest / name).read_bytes())
        content[int(share * (len(content) - 1))] ^= 16
        (newest / name).write_bytes(content)

    damages: dict[str, Callable[[], Any]] = {
        f"SHA-256 of {shard}": lambda: flipped(shard, 0.5),
        f"SHA-256 of {shard} ": lambda: flipped(shard, 0.0),
        "SHA-256 of rest.pt": lambda: flipped("rest.pt", 0.3),
        "SHA-256 of .metadata": lambda: flipped(".metadata", 0.6),
        "0 bytes, ": lambda: (newest / shard).write_bytes(b""),
        f"lacks {shard}": lambda: (newest / shard).unlink(),
        "manifest is damaged": lambda: (newest / "manifest.json").write_text("{"),
        "its manifest is damaged": lambda: forge_name(newest, shard, "../../secret"),
    }
    for said, damage in damages.items():
        damage()
        found = open_newest([str(folder)])
        assert found is not None and found.uri == f"{folder}/ep0-ba2", said
        warned = capfd.readouterr().err
        assert warned.startswith(f"warning: {newest}") and said.strip() in warned, warned
        shutil.rmtree(newest)
        shutil.copytree(good, newest)
    # one that was not finished is none, and is removed
    (newest / "manifest.json").unlink()
    assert [found.uri for found in checkpoints_in(str(folder))] == [f"{folder}/ep0-ba2"]
    stale = newest / "abc__1_0.distcp"
    stale.write_bytes(b"of a killed save")
    code, said = run(tiny, *SHARDED)
    assert code == 0 and f"going on from {folder}/ep0-ba2\n" in said and not stale.exists()
    assert curve(folder.parent) == curve(whole)


def forge_name(folder: Path, name: str, other: str) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(name, other))


@pytest.mark.parametrize("part", ["metadata", "inside", "bytes", "rest", "shard"])
def test_nothing_in_shards_is_executed(part: str, folder: Path, tmp_path: Path) -> None:
    newest, proof = folder / "ep1-ba4", tmp_path / "executed"
    described = pickle.loads((newest / ".metadata").read_bytes())
    name, content = ".metadata", pickle.dumps(Payload(proof))
    if part == "inside":
        described.planner_data = Payload(proof)
        content = pickle.dumps(described)
    elif part == "bytes":  # what torch's own reader would unpickle freely, in place of a tensor
        key = next(iter(described.state_dict_metadata))
        described.state_dict_metadata[key] = torch.distributed.checkpoint.BytesStorageMetadata()
        content = pickle.dumps(described)
    elif part == "rest":
        name = "rest.pt"
        torch.save(Payload(proof), tmp_path / "spoilt")
        content = (tmp_path / "spoilt").read_bytes()
    elif part == "shard":  # in the place of the first tensor
        name = next(path.name for path in newest.glob("*.distcp"))
        first = min(described.storage_data.values(), key=lambda info: info.offset)
        spoilt = pickle.dumps(Payload(proof), protocol=2)
        content = (newest / name).read_bytes()
        content = spoilt.ljust(first.length, b"\0") + content[first.length :]
    forge(newest, name, content)
    with pytest.raises(DamagedCheckpoint, match=r"nothing in it was executed|damaged or no check"):
        read_checkpoint(str(newest))
    assert not proof.exists()
    if part in ("metadata", "inside"):
        pickle.loads(content)
        assert proof.exists()  # it would have been


def test_a_poisoned_description_leaves_older_ones_readable(folder: Path, capfd: Any) -> None:
    newest = folder / "ep1-ba4"
    kind = Global("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")
    forge(newest, ".metadata", with_state(kind, (None, {"__setstate__": None})))
    found = open_newest([str(folder)])
    assert found is not None and found.uri == f"{folder}/ep0-ba2"
    assert f"warning: {newest} is damaged" in capfd.readouterr().err


def test_what_was_checked_is_what_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, proof = folder / "ep1-ba4", tmp_path / "executed"
    weights = flat(read_checkpoint(str(newest)).content["state"]["model"])
    verified = reading.assemble

    def swap(*arguments: Any) -> Any:
        for path in newest.iterdir():
            path.write_bytes(pickle.dumps(Payload(proof)))
        return verified(*arguments)

    monkeypatch.setattr(reading, "assemble", swap)
    assert flat(read_checkpoint(str(newest)).content["state"]["model"]) == weights
    assert not proof.exists() and b"mkdir" in (newest / ".metadata").read_bytes()


def test_a_full_disk_leaves_what_was_there(folder: Path, tiny: Path, run: Run) -> None:
    shutil.rmtree(folder / "ep1-ba4")
    size = max(path.stat().st_size for path in (folder / "ep0-ba2").iterdir())
    with full_disk(size // 2):
        code, said = run(tiny, *SHARDED)
    assert code == 2 and "Traceback" not in said
    assert f"checkpoint {folder}/ep1-ba4 cannot be written: File too large" in said
    assert f"it goes on from the last one, {folder}/ep0-ba2" in said
    assert [found.uri for found in checkpoints_in(str(folder))] == [f"{folder}/ep0-ba2"]
    code, said = run(tiny, *SHARDED, "trainer.keep_checkpoints=1")
    assert code == 0 and [path.name for path in folder.iterdir()] == ["ep1-ba6"], said


@pytest.fixture(scope="module")
def proxy() -> Iterator[FlakyS3]:
    with flaky_s3() as flaky:
        yield flaky


@pytest.fixture
def bucket(proxy: FlakyS3, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a client of an S3 with the bucket ``bucket``."""
    use_bucket(monkeypatch, proxy.url, patience=60)
    client = boto3.client("s3", endpoint_url=proxy.upstream)
    client.create_bucket(Bucket="bucket")
    return client


def names(bucket: Any, prefix: str) -> list[str]:
    found = bucket.list_objects_v2(Bucket="bucket", Prefix=f"{prefix}/").get("Contents", [])
    return [item["Key"].removeprefix(f"{prefix}/") for item in found]


def test_the_manifest_waits_for_the_shards_of_other_ranks(
    folder: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, remote, bucket_list = folder / "ep1-ba4", "s3://bucket/apart", Bucket.list
    own, others = files_of(newest)[:1], files_of(newest)[1:]
    assert others and lacks(remote, newest)
    uploads = Uploads(folder.parent, remote, keep=1)
    killed = ("ep0-ba3/b__0_0.distcp", "ep9-ba99/c__0_0.distcp")
    older = ("ep0-ba1/manifest.json", "ep0-ba1/.metadata", "ep0-ba1/a__0_0.distcp")
    for name in (*older, *killed):
        bucket.put_object(Bucket="bucket", Key=f"apart/{name}", Body=b"an older one")
    monkeypatch.setattr(uploads, "_patience", 3.0)
    looked: list[str] = []

    def look(bucket: Bucket, place: str = "", *, below: bool = False) -> dict[str, int]:
        looked.append(place)
        return bucket_list(bucket, place, below=below)

    monkeypatch.setattr(Bucket, "list", look)
    uploads.offer_together(newest, own)
    until(lambda: "other ranks" in str(uploads._failure))
    assert set(looked) == {"ep1-ba4"}  # not at all that a bucket keeps, again and again
    missing = uploads.finish()
    assert f"{len(others)} files of other ranks are not there" in str(missing)
    assert "It is whole at" in str(missing)
    others[0].rename(folder / "away")  # as where nodes have disks of their own
    missing = uploads.finish()
    assert f"This node's part of it is at {newest}; the same command goes on from" in str(missing)
    (folder / "away").rename(others[0])
    assert f"ep1-ba4/{own[0].name}" in names(bucket, "apart")
    found = [checkpoint.uri for checkpoint in checkpoints_in(remote)]
    assert found == [f"{remote}/ep0-ba1"]  # what is half there is no checkpoint
    uploads.offer_together(folder / "ep0-ba2", files_of(folder / "ep0-ba2"))  # busy: left out
    for path in others:
        bucket.upload_file(str(path), "bucket", f"apart/ep1-ba4/{path.name}")
    monkeypatch.setattr(uploads, "_patience", 60.0)
    assert uploads.finish() is None
    assert not lacks(remote, newest)
    assert read_checkpoint(f"{remote}/ep1-ba4").sha256 == read_checkpoint(str(newest)).sha256
    there = {name.partition("/")[0] for name in names(bucket, "apart") if "/" in name}
    assert there == {"ep0-ba2", "ep1-ba4", "ep9-ba99"}  # what is further may be under way


def test_a_rank_that_tries_again_leaves_nothing_out(
    folder: Path, proxy: FlakyS3, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, at the end of a run that has left a checkpoint out."""
    older, newest = files_of(folder / "ep0-ba2"), files_of(folder / "ep1-ba4")
    first, second = (Uploads(folder.parent, "s3://bucket/again") for _ in range(2))
    second._leads = False
    monkeypatch.setattr(first, "_patience", 10.0)
    proxy.refused_writes = 3  # as often as boto tries
    second.offer_together(folder / "ep0-ba2", older[1:])
    until(lambda: second._failure is not None)
    proxy.refused_writes = 0
    first.offer_together(folder / "ep0-ba2", older[:1])
    for uploads, own in ((second, newest[1:]), (first, newest[:1])):
        uploads.offer_together(folder / "ep1-ba4", own)  # busy: left out
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(Uploads.finish, (second, first))) == [None, None]
    for name in ("ep0-ba2", "ep1-ba4"):
        assert not lacks("s3://bucket/again", folder / name)


def test_ranks_come_and_go(
    folder: Path, whole: Path, proxy: FlakyS3, bucket: Any, tiny: Path, run: Run, tmp_path: Path
) -> None:
    shutil.rmtree(folder / "ep1-ba4")
    script = Path(__file__).with_name("sharded_ranks.py")
    start = [*launcher(2), str(script), str(tiny), str(tmp_path / "runs")]
    done = finished([*start, *SHARDED, "trainer.fsdp={}"], env=environment())
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    assert said.count(f"going on from {folder}/ep0-ba2\n") == 1
    assert "their RNG restored" not in said  # nothing depends on what a new rank lacks
    assert said.count("going on from s3://bucket/shards/ep1-ba4\n") == 1
    # once for both ranks, which share a node
    fetched = [name for name in names(bucket, "shards/ep1-ba4") if name.endswith(".distcp")]
    assert fetched and {proxy.gets[name] for name in fetched} == {1}
    losses = [step[1] for step in curve(whole)]
    assert [step[1] for step in curve(folder.parent)] == pytest.approx(losses, rel=1e-5)
    shards = [path.name for path in (folder / "ep1-ba6").glob("*.distcp")]
    assert sorted(name[8:] for name in shards) == ["__0_0.distcp", "__1_0.distcp"]
    local = {path.name for path in (folder / "ep1-ba6").iterdir()}
    assert {f"ep1-ba6/{name}" for name in local} <= set(names(bucket, "shards"))
    # and one process goes on from what two have left in the bucket
    shutil.rmtree(folder)
    bucket.delete_object(Bucket="bucket", Key="shards/ep1-ba6/manifest.json")
    code, said = run(tiny, *SHARDED, "trainer.save_folder=s3://bucket/shards")
    assert code == 0 and "going on from s3://bucket/shards/ep1-ba4\n" in said, said
    assert [step[1] for step in curve(folder.parent)] == pytest.approx(losses, rel=1e-5)
