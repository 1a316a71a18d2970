"""MDS shards from an S3 server on this machine: the first epoch, which fetches, and the second.

The server is moto's, in this process, which only waits meanwhile. It takes its share of the same
cores (and more of them than a real bucket, which takes none), so the first epoch is slower than
from a network that is as fast. Both loaders read the same small shards, with an empty cache in
every run; the first epoch counts from asking for it, in a process that has just built its loader.
"""

import logging
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

from tests.benchmarks.loader_bench import ONE_VIEW, Bench
from tests.benchmarks.loader_tables import Table, rate_rows
from tests.benchmarks.loader_worker import Job, Worker
from tests.data.flaky_s3 import access, moto_server

_BUCKET = "bench"


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
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # no line for each request
    rates: dict[str, list[float]] = {f"{name}, epoch {n}": [] for name in jobs for n in (1, 2)}
    with moto_server() as port:
        extra = access(f"http://127.0.0.1:{port}")
        with mock.patch.dict(os.environ, extra):
            _upload(shards, extra["S3_ENDPOINT_URL"])
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


def _upload(shards: Path, endpoint: str) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=_BUCKET)
    for path in sorted(shards.iterdir()):
        client.upload_file(str(path), _BUCKET, f"images/{path.name}")
