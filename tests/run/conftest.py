"""The tiny recipe of the tests of training, its command in this process, a finished run, an S3."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from pospre.train import main
from tests.data.flaky_s3 import FlakyS3, flaky_s3, keys, use_bucket
from tests.training.conftest import run as run
from tests.training.conftest import tiny as tiny
from tests.training.tiny_runs import SHORT, write_tiny


@pytest.fixture(scope="session")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of a tiny recipe, of which ``trained`` gives a copy."""
    folder = tmp_path_factory.mktemp("six_steps")
    assert main([str(write_tiny(folder)), *SHORT]) == 0
    return folder / "runs" / "tiny"


@pytest.fixture
def trained(tiny: Path, six_steps: Path, tmp_path: Path) -> Path:
    """Return the folder of the tiny recipe's run as ``SHORT`` leaves it."""
    return shutil.copytree(six_steps, tmp_path / "runs" / "tiny")


@pytest.fixture(scope="module")
def proxy() -> Iterator[FlakyS3]:
    """Give an S3 that misbehaves on demand."""
    with flaky_s3() as flaky:
        yield flaky


@pytest.fixture
def bucket(proxy: FlakyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lead a test to that S3, with an empty bucket ``bucket``; give a client past the proxy."""
    use_bucket(monkeypatch, proxy.url, patience=60)
    client: Any = boto3.client("s3", endpoint_url=proxy.upstream)
    client.create_bucket(Bucket="bucket")
    yield client
    proxy.heal()
    for key in keys(client):
        client.delete_object(Bucket="bucket", Key=key)
