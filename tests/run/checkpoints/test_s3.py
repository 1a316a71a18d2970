"""Checkpoints in a bucket, over HTTP: saved, resumed, and refused within seconds."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from data_prep import convert
from pospre.errors import UserError
from pospre.run.checkpoints.folders import NOTE
from pospre.run.folder import mirror_run
from pospre.training.build import build_model
from pospre.training.start_weights import load_weights
from tests.data.flaky_s3 import keys
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.refusals import found_in
from tests.training.tiny_runs import SHORT, Run, curve

FOLDER = "trainer.save_folder=s3://bucket/runs/tiny"


def names(client: Any) -> list[str]:
    return keys(client, "runs/tiny/")


def test_resume_from_the_bucket(
    bucket: Any, tiny: Path, run: Run, six_steps: Path, tmp_path: Path
) -> None:
    often = ("evaluation={knn: {every: 2ba, k: 3, baseline: false}}", "trainer.keep_best=knn/top1")
    code, said = run(tiny, *SHORT, *often, FOLDER, "trainer.keep_remote=1")
    assert code == 0, said
    assert {f"ep1-ba6/{name}" for name in ("state.json", "manifest.json")} <= set(names(bucket))
    best = json.loads((tmp_path / "runs" / "tiny" / "checkpoints" / "best" / NOTE).read_text())
    kept = {f"best/{NOTE}", f"{best['checkpoint']}/manifest.json"}
    assert kept <= set(names(bucket))
    code, said = run(tiny, *SHORT, FOLDER)
    assert code == 0 and "already finished" in said
    # as if the run had been killed after its fourth step, and its disk been lost
    for path in (tmp_path / "runs/tiny/checkpoints/ep1-ba4").iterdir():  # may have been left out
        bucket.upload_file(str(path), "bucket", f"runs/tiny/ep1-ba4/{path.name}")
    bucket.delete_object(Bucket="bucket", Key="runs/tiny/ep1-ba6/manifest.json")
    # the run's small files are there as well, and take up the curve where the local ones are gone
    assert {"recipe.yaml", "pretext_tasks.json", "metrics.jsonl", "report.html"} <= set(
        names(bucket)
    )
    warning = b'{"step": 2, "warning": "of its first start"}\n'
    bucket.put_object(Bucket="bucket", Key="runs/tiny/watch.jsonl", Body=warning)
    code, said = run(tiny, *SHORT, FOLDER, f"trainer.run_folder={tmp_path}/fresh")
    assert code == 0 and "resuming from s3://bucket/runs/tiny/ep1-ba4" in said
    assert (tmp_path / "fresh" / "tiny" / "watch.jsonl").read_bytes() == warning
    assert curve(tmp_path / "fresh" / "tiny") == curve(six_steps)
    # on a machine that has not seen this run
    code, said = run(tiny, *SHORT, FOLDER, f"trainer.run_folder={tmp_path}/elsewhere", "seed=1")
    assert code == 2 and "seed = 0" in said


def refused(run: Run, tiny: Path, words: str, *options: str, code: int = 2) -> None:
    """Check that a start says at once what is wrong (words with … between), and writes nothing."""
    start, before = time.monotonic(), found_in(tiny.parent)
    ended, said = run(tiny, FOLDER, *options)
    assert time.monotonic() - start < 15
    assert ended == code and said.startswith("error: ") and "Traceback" not in said
    assert all(each in said for each in words.split(" … ")), said
    assert found_in(tiny.parent) == before


ENDPOINT = "S3_ENDPOINT_URL"
NO_KEY = {
    "AWS_ACCESS_KEY_ID": "",
    "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.mark.parametrize(
    ("words", "variables", "option", "code"),
    [
        ("bucket 'missing' does not exist", {}, "trainer.save_folder=s3://missing/tiny", 2),
        ("has no bucket name", {}, "trainer.save_folder=s3:///tiny", 2),
        ("error: s3://bucket/nothing", {}, "data.path=s3://bucket/nothing", 2),
        ("AWS_ACCESS_KEY_ID", NO_KEY, FOLDER, 2),
        ("http://127.0.0.1:9 does not answer", {ENDPOINT: "http://127.0.0.1:9"}, FOLDER, 69),
        ("localhost:9000 … http://host:port", {ENDPOINT: "localhost:9000"}, FOLDER, 2),
        ("http://in valid … http://host:port", {ENDPOINT: "http://in valid"}, FOLDER, 2),
    ],
)
def test_what_is_wrong_with_a_bucket_is_said_at_once(
    words: str, variables: dict[str, str], option: str, code: int,
    bucket: Any, tiny: Path, run: Run, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cache = f"data.cache_dir={tmp_path_factory.mktemp('cache')}"
    refused(run, tiny, words, option, cache, code=code)


def test_wrong_credentials(bucket: Any, tiny: Path, run: Run) -> None:
    url = bucket.meta.endpoint_url
    requests.post(f"{url}/moto-api/reset-auth", data=b"0", timeout=5)
    try:
        refused(run, tiny, "refuses the credentials")
    finally:
        requests.post(f"{url}/moto-api/reset-auth", data=b"1000000", timeout=5)


def test_the_small_files_of_a_run_are_not_worth_it(
    tiny: Path, run: Run, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails_once(*place: Any) -> None:
        calls.extend([place] * (tiny.parent in place[0].parents))  # not other tests' threads
        if calls == [place]:
            raise UserError("the endpoint does not answer")
        mirror_run(*place)

    monkeypatch.setattr("pospre.run.checkpoints.uploads.mirror_run", fails_once)
    code, said = run(tiny, "trainer.max_duration=1ep", "trainer.save_folder=s3://bucket/runs/apart")
    assert "warning: the endpoint does not answer; training continues" in said
    assert code == 0


def test_an_encoder_starts_from_the_bucket(bucket: Any, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "runs", "mae")
    checkpoint = save_checkpoint(recipe)
    exported = tmp_path / "encoder.pth"
    source = build_model(recipe)
    torch.save(source.encoder.state_dict(), exported)
    for path in checkpoint.iterdir():
        bucket.upload_file(str(path), "bucket", f"runs/start/{checkpoint.name}/{path.name}")
    bucket.upload_file(str(exported), "bucket", "encoder.pth")
    for address, name in (
        ("s3://bucket/runs/start", checkpoint.name),
        (f"s3://bucket/runs/start/{checkpoint.name}", checkpoint.name),
        ("s3://bucket/encoder.pth", "encoder.pth"),
    ):
        assert name in load_weights(build_model(recipe), address)
    with pytest.raises(UserError, match=r"s3://bucket/none.pth does not exist"):
        load_weights(build_model(recipe), "s3://bucket/none.pth")


def test_shards_in_the_bucket_train_as_the_folder_does(
    bucket: Any, tiny: Path, run: Run, trained: Path, six_steps: Path, tmp_path: Path
) -> None:
    assert convert.main([f"{tmp_path}/images", "s3://bucket/shards", "--format", "mds"]) == 0
    options = (*SHORT, f"data.cache_dir={tmp_path}/cache", "data.path=s3://bucket/shards")
    code, said = run(tiny, *options, "run_name=remote")
    assert code == 0, said
    assert curve(tmp_path / "runs" / "remote") == curve(six_steps)
    # a run goes on elsewhere: other format, another cache
    shutil.rmtree(tmp_path / "cache")
    for name in ("ep1-ba4", "ep1-ba6"):
        shutil.rmtree(trained / "checkpoints" / name)
    code, said = run(tiny, *options)
    assert code == 0 and "resuming from" in said, said
    assert curve(trained) == curve(six_steps)
