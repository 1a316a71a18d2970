"""MDS shards from an S3 server on this machine: the first epoch, which fetches, and the second.

The server is moto's, in a process of its own. It takes its share of the same cores (and more of
them than a real bucket, which takes none), so the first epoch is slower than from a network that is
as fast. Both loaders read the same small shards, with an empty cache in every run; the first epoch
counts from asking for it, in a process that has just built its loader.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.loader_bench import ONE_VIEW, Bench
from tests.benchmarks.loader_tables import Table, rate_rows
from tests.benchmarks.loader_worker import Job, Worker

_BUCKET = "bench"
_START_SECONDS = 60.0


def from_s3(bench: Bench) -> Table:
    """Two epochs of each loader, in turn, each time in a new process with an empty cache."""
    shards, cache = bench.prepared("small_mds"), bench.work / "s3_cache"
    remote = f"s3://{_BUCKET}/images"
    jobs = {
        "ours, s3://": bench.job("ours", remote, ONE_VIEW, cache_dir=str(cache)),
        "stock StreamingDataset, s3://": bench.job("streaming", cache, ONE_VIEW, remote=remote),
        "ours, local": bench.job("ours", shards, ONE_VIEW),
        "stock StreamingDataset, local": bench.job("streaming", shards, ONE_VIEW),
    }
    rates: dict[str, list[float]] = {f"{name}, epoch {n}": [] for name in jobs for n in (1, 2)}
    with _server(bench.work) as extra:
        _upload(shards, extra)
        for run in range(bench.runs + 1):
            for name, job in jobs.items():
                shutil.rmtree(cache, ignore_errors=True)
                for number, rate in enumerate(_two_epochs(job, bench.work, extra), 1):
                    print(
                        f"  run {run}: {name}, epoch {number} {rate:.0f} images/s", file=sys.stderr
                    )
                    if run:
                        rates[f"{name}, epoch {number}"].append(rate)
    shutil.rmtree(cache, ignore_errors=True)
    references = {
        "× stock, epoch 1": ["stock StreamingDataset, s3://, epoch 1"],
        "× stock, epoch 2": ["stock StreamingDataset, s3://, epoch 2"],
        "× ours, local, epoch 2": ["ours, local, epoch 2"],
    }
    title = "1×224 from MDS shards in a bucket, new process and empty cache each time"
    return Table("s3", title, "images/s", rate_rows(rates, references))


def _two_epochs(job: Job, folder: Path, extra: dict[str, str]) -> tuple[float, float]:
    worker = Worker(job, folder / f"{os.getpid()}-s3.log", extra)
    try:
        return worker.first.rate, worker.epoch().rate
    finally:
        worker.close()


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[dict[str, str]]:
    """Serve S3 on a free port; give the environment that says where it is."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with (folder / f"{os.getpid()}-moto.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        end = time.monotonic() + _START_SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"moto's server did not start; see {log.name}")
            time.sleep(0.1)
        yield {
            "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait()


def _upload(shards: Path, extra: dict[str, str]) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=extra["S3_ENDPOINT_URL"],
        aws_access_key_id=extra["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=extra["AWS_SECRET_ACCESS_KEY"],
        region_name=extra["AWS_DEFAULT_REGION"],
    )
    client.create_bucket(Bucket=_BUCKET)
    for path in sorted(shards.iterdir()):
        client.upload_file(str(path), _BUCKET, f"images/{path.name}")
