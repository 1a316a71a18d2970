"""Checkpoints that all ranks write together: the same content, on any number of ranks."""

import itertools
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from pospre.object_store import Bucket
from pospre.run.checkpoints import rank_files
from pospre.run.checkpoints.files import files_of
from pospre.run.checkpoints.folders import checkpoints_in
from pospre.run.checkpoints.rank_files import own_shard
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.run.checkpoints.uploads import Uploads, lacks
from tests.data.flaky_s3 import FlakyS3, keys
from tests.processes import finished, launcher, until
from tests.training.tiny_runs import MAE, SHORT, Run, curve, environment

MAE_RUN = (*SHORT, MAE)


@pytest.fixture
def folder(tiny: Path, run: Run, tmp_path: Path) -> Path:
    """Return the checkpoints of a run that was killed after its fifth step."""
    assert run(tiny, *MAE_RUN)[0] == 0
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    shutil.copytree(folder.parent, tmp_path / "whole")
    shutil.rmtree(folder / "ep1-ba6")
    return folder


class Sharded:
    """A DTensor on one rank of a mesh, without processes."""

    def __init__(self, whole: Tensor, place: tuple[int, ...], mesh: Tensor) -> None:
        self.shape, self.dim, self.numel = whole.shape, whole.dim, whole.numel
        self.placements = [Replicate()] * (mesh.dim() - 1) + [Shard(0)]
        self.device_mesh = SimpleNamespace(get_coordinate=lambda: place, size=mesh.size)
        chunks = whole.chunk(mesh.shape[-1])
        self.local = chunks[place[-1]] if place[-1] < len(chunks) else whole[:0]

    def to_local(self) -> Tensor:
        return self.local


@pytest.mark.parametrize("length", [0, 1, 4, 5, 9])
@pytest.mark.parametrize("degrees", [(4,), (2, 3)])
def test_shards_cover_a_tensor_once(
    degrees: tuple[int, ...], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "DTensor", Sharded)
    whole, mesh = torch.arange(3.0 * length).reshape(length, 3), torch.zeros(degrees)
    ranks = enumerate(itertools.product(*map(range, degrees)))
    found = [own_shard(Sharded(whole, place, mesh), rank) for rank, place in ranks]  # type: ignore[arg-type]
    shards = sorted((each for each in found if each is not None), key=lambda each: each[1])
    starts = [offset for _, offset in shards]
    assert torch.equal(torch.cat([shard for shard, _ in shards]), whole)
    assert starts == [[sum(len(s) for s, _ in shards[:n]), 0] for n in range(len(shards))]
    assert own_shard(whole, 0) == (whole, [0, 0]) and own_shard(whole, 1) is None


def names(bucket: Any, prefix: str) -> list[str]:
    return keys(bucket, f"{prefix}/")


def test_the_manifest_waits_for_the_shards_of_other_ranks(
    folder: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, remote, bucket_list = folder / "ep1-ba4", "s3://bucket/apart", Bucket.list
    own, others = files_of(newest)[:1], files_of(newest)[1:]
    assert others and lacks(remote, newest)
    uploads = Uploads(folder.parent, remote, keep=1)
    killed = ("ep0-ba3/rank0-b.safetensors", "ep9-ba99/rank0-c.safetensors")
    older = tuple(f"ep0-ba1/{name}" for name in ("manifest.json", "state.json", "rank0-a"))
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
    assert "It is complete at" in str(missing)
    others[0].rename(folder / "away")  # as where nodes have disks of their own
    missing = uploads.finish()
    assert f"This node's part of it is at {newest}; the same command resumes from" in str(missing)
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

    def start_late() -> None:
        time.sleep(0.3)
        first._work()

    vars(first._thread)["_target"] = start_late
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
    folder: Path, proxy: FlakyS3, bucket: Any, tiny: Path, run: Run, tmp_path: Path
) -> None:
    shutil.rmtree(folder / "ep1-ba4")
    script = Path(__file__).with_name("sharded_ranks.py")
    start = [*launcher(2), str(script), str(tiny), str(tmp_path / "runs")]
    done = finished([*start, *MAE_RUN, "trainer.fsdp={}"], env=environment())
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    assert said.count(f"resuming from {folder}/ep0-ba2\n") == 1
    assert "their RNG restored" not in said  # nothing depends on what a new rank lacks
    assert said.count("resuming from s3://bucket/shards/ep1-ba4\n") == 1
    # once for both ranks, which share a node
    fetched = [name for name in names(bucket, "shards/ep1-ba4") if name.endswith("tensors")]
    assert fetched and {proxy.gets[name] for name in fetched} == {1}
    losses = [step[1] for step in curve(tmp_path / "whole")]
    assert [step[1] for step in curve(folder.parent)] == pytest.approx(losses, rel=1e-5)
    shards = [path.name for path in (folder / "ep1-ba6").glob("*.safetensors")]
    assert sorted(name[:5] for name in shards) == ["rank0", "rank1"]
    local = {path.name for path in (folder / "ep1-ba6").iterdir()}
    assert {f"ep1-ba6/{name}" for name in local} <= set(names(bucket, "shards"))
    # and one process goes on from what two have left in the bucket
    shutil.rmtree(folder)
    bucket.delete_object(Bucket="bucket", Key="shards/ep1-ba6/manifest.json")
    code, said = run(tiny, *MAE_RUN, "trainer.save_folder=s3://bucket/shards")
    assert code == 0 and "resuming from s3://bucket/shards/ep1-ba4\n" in said, said
    assert [step[1] for step in curve(folder.parent)] == pytest.approx(losses, rel=1e-5)


def test_two_ranks_load_what_the_first_one_read(tiny: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_ranks_resume.py")
    start = [*launcher(2), str(script), str(tiny), str(tmp_path / "runs")]
    done = finished([*start, *SHORT, "trainer.fsdp={}"], env=environment())
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said, said
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    assert said.count(f"resuming from {folder}/ep1-ba4\n") == 1
    assert re.search(rf"{folder}/ep1-ba4 on \S+ differs from what the first rank read", said)
    assert not (folder / "ep1-ba6").exists()
