"""Uploads beside the training: no step waits for them, no outage ends a run, nothing is lost."""

import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import boto3
import pytest

from pospre.evaluation.best_checkpoint import BestCheckpoint
from pospre.object_store import Bucket
from pospre.recipe.recipe import load_recipe
from pospre.run.checkpoints import uploads as uploading
from pospre.run.checkpoints.files import files_of
from pospre.run.checkpoints.folders import NOTE, remove_checkpoints
from pospre.run.checkpoints.reading import Checkpoint, open_checkpoint
from pospre.run.checkpoints.uploads import Uploads, lacks
from pospre.run.folder import clear, mirror_run, restore_run
from pospre.run.run import in_bucket
from pospre.training.build import load_model
from tests.data.flaky_s3 import FlakyS3, keys
from tests.processes import until
from tests.run.checkpoints.checkpoint_files import CONTENT, shard, write_checkpoint
from tests.training.tiny_runs import SHORT, Run, curve, metrics

REMOTE = "s3://bucket/runs/tiny"
OPTIONS = (f"trainer.save_folder={REMOTE}", *SHORT)


@pytest.fixture
def server(proxy: FlakyS3, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> FlakyS3:
    """Return an S3 that misbehaves on demand, with an empty bucket ``bucket``."""
    monkeypatch.setattr(uploading, "_FIRST_PAUSE", 0.1)
    return proxy


def client(server: FlakyS3) -> Any:
    return boto3.client("s3", endpoint_url=server.upstream)


def names(server: FlakyS3, folder: str = "runs/tiny") -> list[str]:
    return keys(client(server), f"{folder}/")


def checkpoint(folder: Path, batch: int) -> Path:
    path = folder / f"ep0-ba{batch}"
    write_checkpoint({**CONTENT, "more": list(range(batch, batch + 1000))}, path)
    return path


FILES = ["manifest.json", "state.json"]
"""Those of such a checkpoint."""


def files(*names: str) -> list[str]:
    """Return the names of the objects of some checkpoints."""
    return [f"{name}/{file}" for name in names for file in FILES]


def test_the_manifest_goes_up_last(server: FlakyS3, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    path = checkpoint(tmp_path, 2)
    assert lacks(REMOTE, path)
    with Uploads(tmp_path, REMOTE) as uploads:
        uploads.offer(path)
    order = [place.rpartition("/")[2] for place in server.writes]
    assert order == ["metrics.jsonl", "state.json", "manifest.json"]
    assert not lacks(REMOTE, path)
    write_checkpoint({**CONTENT, "more": 1}, path)
    assert lacks(REMOTE, path)


class Machine:
    """A machine that trains and measures, with a bucket that keeps one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        restore_run(folder, REMOTE)
        self.best = BestCheckpoint(folder / "metrics.jsonl", self.checkpoints, "knn/top1", "max")
        self.best.look_into(REMOTE)
        self.best.settle()

    def train(self, batch: int, figure: float, *, left_out: bool = False) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": batch, "knn/top1": figure}) + "\n")
        self.best.settle(checkpoint(self.checkpoints, batch))
        if not left_out:
            with Uploads(self.folder, REMOTE, keep=1) as uploads:
                uploads.offer(self.checkpoints / f"ep0-ba{batch}")


def test_the_best_one_stays_for_another_machine(server: FlakyS3, tmp_path: Path) -> None:
    def there() -> set[str]:
        return {name.partition("/")[0] for name in names(server)} - {"metrics.jsonl", "best"}

    first = Machine(tmp_path / "first")
    first.train(3, 0.2)
    first.train(6, 0.5, left_out=True)  # the bucket was busy with another one
    first.train(9, 0.3)
    assert there() == {"ep0-ba6", "ep0-ba9"}
    second = Machine(tmp_path / "second")
    second.train(12, 0.4)
    assert there() == {"ep0-ba12", "ep0-ba6"}
    note = json.loads((second.best.folder / NOTE).read_text())
    assert note == {"step": 6, "figure": "knn/top1", "value": 0.5, "checkpoint": "ep0-ba6"}
    assert open_checkpoint(f"{REMOTE}/best").uri == f"{REMOTE}/ep0-ba6"
    second.train(15, 0.6)
    assert there() == {"ep0-ba15"} and f"best/{NOTE}" in names(server)
    remove_checkpoints(REMOTE)
    assert names(server) == ["metrics.jsonl"]


def test_what_was_measured_is_on_the_next_machine_and_goes_when_the_run_starts_over(
    server: FlakyS3, tiny: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(tiny, [f"trainer.save_folder={REMOTE}"])
    here, there = recipe.run_path(), tmp_path / "there"
    measured = ["evaluation/history.jsonl", "evaluation/knn.json", "metrics.jsonl", "watch.jsonl"]
    for name in ("recipe.yaml", "evaluation/knn.json.0.partial", *measured):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f'{{"step": 2, "of": "{name}"}}\n')
    mirror_run(here, Bucket(REMOTE))
    assert names(server) == sorted([*measured, "recipe.yaml"])
    there.mkdir()
    restore_run(there, REMOTE)
    assert {path: (there / path).read_bytes() for path in measured} == {
        path: (here / path).read_bytes() for path in measured
    }
    (there / "evaluation" / "knn.json").write_text("newer")
    restore_run(there, REMOTE)
    assert (there / "evaluation" / "knn.json").read_text() == "newer"
    clear(recipe)
    assert names(server) == [] and not [*here.iterdir()]


def test_a_slow_bucket_gets_the_newest_only(server: FlakyS3, tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, REMOTE)
    server.mute = "ep0-ba1/state.json"
    uploads.offer(checkpoint(tmp_path, 1))
    until(lambda: any(place.endswith("ep0-ba1/state.json") for place in server.writes))
    for batch in (2, 3):
        uploads.offer(checkpoint(tmp_path, batch))
    first = (tmp_path / "ep0-ba1" / "state.json").read_bytes()
    for batch in (1, 2):  # the saver keeps one only
        shutil.rmtree(tmp_path / f"ep0-ba{batch}")
    server.mute = None
    assert uploads.finish() is None
    assert read(server, "ep0-ba1/state.json") == first  # what was under way was not disturbed
    assert read(server, "ep0-ba3/state.json") == (tmp_path / "ep0-ba3" / "state.json").read_bytes()
    assert names(server) == files("ep0-ba1", "ep0-ba3")


def test_a_checkpoint_that_has_gone_delays_no_other(
    server: FlakyS3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path, 1)
    written = files_of(path)
    shutil.rmtree(path)
    uploads = Uploads(tmp_path, REMOTE)
    uploads._warned = True  # of what kept it from going up in time
    uploads.offer_together(path, written)
    assert uploads.finish() is None and names(server) == []
    assert "is there" not in capfd.readouterr().err


def test_a_rank_that_has_written_nothing_uploads_nothing(server: FlakyS3, tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, REMOTE)
    uploads._leads = False
    uploads.offer_together(checkpoint(tmp_path, 1), [])
    assert uploads.finish() is None and names(server) == []


def test_the_oldest_go_once_a_newer_one_is_whole(
    server: FlakyS3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    s3 = client(server)
    half, further = "ep0-ba1/state.json", "ep9-ba99/state.json"
    for name in (half, *files("ep0-ba10"), further, "metrics.jsonl"):
        s3.put_object(Bucket="bucket", Key=f"runs/tiny/{name}", Body=b"of earlier starts")
    path = checkpoint(tmp_path, 11)
    uploads = Uploads(tmp_path, REMOTE, keep=2)
    server.mute = "ep0-ba11/manifest"  # the bytes are up, what says that they are whole is not
    uploads.offer(path)
    until(lambda: any(place.endswith("ep0-ba11/manifest.json") for place in server.writes))
    assert {half, *files("ep0-ba10"), "ep0-ba11/state.json"} <= set(names(server))
    server.mute = None
    assert uploads.finish() is None
    assert names(server) == [*files("ep0-ba10", "ep0-ba11"), further, "metrics.jsonl"]
    # in the order in which nothing is ever without what says that it is whole
    server.deletes.clear()
    uploads.offer(checkpoint(tmp_path, 12))
    assert uploads.finish() is None
    assert server.deletes == ["manifest.json", "manifest.json", "state.json"]
    assert "warning" not in capfd.readouterr().err
    # a bucket from which nothing may be deleted is no reason to do without the new one
    server.forbids_deletes = "ep0-ba11"
    uploads.offer(checkpoint(tmp_path, 13))
    assert uploads.finish() is None
    assert set(files("ep0-ba11", "ep0-ba13")) <= set(names(server))
    assert f"warning: old checkpoints stay in {REMOTE}" in capfd.readouterr().err


def test_a_silent_server_holds_no_step(
    server: FlakyS3, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "tiny"
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "1")
    server.mute = "/runs/tiny/ep"  # from the first checkpoint on
    code, said = run(tiny, *OPTIONS)
    assert code == 69 and "Traceback" not in said
    assert "waiting for" in said and "gives up after 1 s without progress" in said
    assert f"It is complete at {folder}/checkpoints/ep1-ba6" in said
    assert "run the command again to upload it" in said
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["time"] - lines[0]["time"] < 15  # a single try takes 20 s
    assert not [name for name in names(server) if name.startswith("ep")]

    server.heal()  # the bucket is there again: what it lacks is uploaded, nothing trained
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "60")
    code, said = run(tiny, *OPTIONS)
    assert code == 0 and "already finished" in said, said
    assert {*files("ep1-ba6"), "report.html"} <= set(names(server))
    shutil.rmtree(folder / "checkpoints")
    load_model(REMOTE)


def test_an_outage_does_not_end_a_run(
    server: FlakyS3, tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn = Uploads._warn

    def breaks(_: str) -> None:
        server.refused_writes = 1000

    def comes_back(uploads: Uploads, error: Exception) -> None:
        warn(uploads, error)
        server.heal()

    monkeypatch.setattr("pospre.run.run.check_writable", breaks)
    monkeypatch.setattr(Uploads, "_warn", comes_back)
    code, said = run(tiny, *OPTIONS)
    assert code == 0 and said.count("warning:") == 1, said
    assert f"{REMOTE} answers again: ep1-ba6 is there" in said
    assert set(files("ep1-ba6")) <= set(names(server))


def test_a_bucket_that_vanishes_costs_nothing(
    server: FlakyS3, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = client(server)
    gone = "trainer.save_folder=s3://vanishing/runs/tiny"
    s3.create_bucket(Bucket="vanishing")

    def vanishes(_: str) -> None:
        s3.delete_object(Bucket="vanishing", Key="runs/tiny/run.lease")
        s3.delete_bucket(Bucket="vanishing")

    monkeypatch.setattr("pospre.run.run.check_writable", vanishes)
    monkeypatch.setattr("pospre.run.run.checkpoint_folders", lambda recipe: [])
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "1")
    code, said = run(tiny, *OPTIONS, gone)
    folder = tmp_path / "runs" / "tiny"
    assert code == 2 and "Traceback" not in said, said
    assert "warning: bucket 'vanishing' does not exist" in said and "training continues" in said
    assert f"It is complete at {folder}/checkpoints/ep1-ba6; run the command again" in said
    assert [step for step, *_ in curve(folder)] == [1, 2, 3, 4, 5, 6]


def as_if_killed(s3: Any, run_folder: Path) -> None:
    """Leave in the bucket what a run had saved by its fifth step, and its metrics."""
    for path in (run_folder / "checkpoints" / "ep1-ba4").iterdir():
        s3.upload_file(str(path), "bucket", f"runs/tiny/ep1-ba4/{path.name}")
    s3.upload_file(str(run_folder / "metrics.jsonl"), "bucket", "runs/tiny/metrics.jsonl")


def test_the_newest_of_disk_and_bucket(
    server: FlakyS3, tiny: Path, run: Run, trained: Path, tmp_path: Path
) -> None:
    here, there = trained, tmp_path / "elsewhere" / "tiny"
    whole = curve(here)
    shutil.copytree(here, there)
    # this machine knows the first two steps, another one has gone on to the fourth
    for batch in ("ep1-ba4", "ep1-ba6"):
        shutil.rmtree(here / "checkpoints" / batch)
    lines = (here / "metrics.jsonl").read_text().splitlines(keepends=True)
    (here / "metrics.jsonl").write_text("".join(lines[:2]))
    s3 = client(server)
    as_if_killed(s3, there)
    code, said = run(tiny, *OPTIONS)
    assert code == 0 and f"resuming from {REMOTE}/ep1-ba4" in said, said
    assert curve(here) == whole
    # an object of the newest is cut short (a copy by hand): the one before is on the disk
    newest = here / "checkpoints" / "ep1-ba6"
    name, body = f"ep1-ba6/{shard(newest).name}", shard(newest).read_bytes()
    s3.put_object(Bucket="bucket", Key=f"runs/tiny/{name}", Body=body[: len(body) // 2])
    shutil.rmtree(newest)
    shutil.copytree(there / "checkpoints" / "ep1-ba4", newest.with_name("ep1-ba4"))
    code, said = run(tiny, *OPTIONS)
    assert code == 0 and f"warning: {REMOTE}/ep1-ba6 is damaged" in said
    assert f"resuming from {here}/checkpoints/ep1-ba4" in said
    assert curve(here) == whole
    name = f"ep1-ba6/{shard(newest).name}"
    assert read(server, name) == shard(newest).read_bytes()


def read(server: FlakyS3, name: str) -> bytes:
    answer = client(server).get_object(Bucket="bucket", Key=f"runs/tiny/{name}")
    return bytes(answer["Body"].read())


def test_an_object_swapped_after_the_check_is_not_loaded(
    server: FlakyS3, tiny: Path, run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = client(server)
    whole = curve(trained)
    as_if_killed(s3, trained)
    shard_name = shard(trained / "checkpoints" / "ep1-ba4").name
    shutil.rmtree(trained / "checkpoints")
    download = Bucket.download
    read_objects = []

    def swapped(bucket: Bucket, target: BinaryIO, name: str) -> None:
        download(bucket, target, name)
        read_objects.append(name)
        s3.put_object(Bucket="bucket", Key=bucket.path(name), Body=b"whatever it holds by now")

    monkeypatch.setattr(Bucket, "download", swapped)
    code, said = run(tiny, *OPTIONS)
    assert code == 0 and f"resuming from {REMOTE}/ep1-ba4" in said, said
    # none was fetched twice
    assert sorted(read_objects) == sorted([shard_name, *FILES])
    assert curve(trained) == whole


def test_nodes_without_a_common_disk_go_on_from_the_bucket(
    server: FlakyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, 2)
    start = Checkpoint(str(path), "", {})
    with Uploads(tmp_path, REMOTE) as uploads:
        assert in_bucket(start, uploads) == start
        monkeypatch.setattr("pospre.run.run.dist.get_world_size", lambda: 16)
        monkeypatch.setattr("pospre.run.run.dist.get_local_world_size", lambda: 8)
        assert in_bucket(start, uploads) == start._replace(uri=f"{REMOTE}/ep0-ba2")
        assert names(server) == files("ep0-ba2")
