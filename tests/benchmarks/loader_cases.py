"""What is measured of loaders: their speed, formats, buckets and memory, each case a table."""

import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pospre.errors import UserError
from tests.benchmarks import loader_data
from tests.benchmarks.loader_tables import Row, Table, rate_rows
from tests.benchmarks.loader_worker import (
    Epoch,
    Job,
    LoaderDied,
    Views,
    Worker,
    leave_out,
    take_turns,
)
from tests.data.flaky_s3 import access
from tests.data.seaweed import NO_WEED, seaweed, weed

ONE_VIEW = (Views(1, 224, (0.08, 1.0)),)
MULTI_CROP = (Views(2, 224, (0.32, 1.0)), Views(8, 96, (0.05, 0.32)))
MEMORY_EPOCHS = 20

# Of each contestant: function of loader_peers, format of the data, options.
_Contestants = dict[str, tuple[str, str, dict[str, Any]]]
_OURS: _Contestants = {
    "ours, .beton": ("ours", "beton", {}),
    "ours, .beton, bilinear": ("ours", "beton", {"interpolation": "bilinear"}),
    "ours, .beton --seekable": ("ours", "seekable", {}),
    "ours, .beton --seekable, bilinear": ("ours", "seekable", {"interpolation": "bilinear"}),
    "ours, MDS": ("ours", "mds", {}),
    "ours, folder": ("ours", "folder", {}),
}
_FFCV: _Contestants = {
    "stock FFCV": ("ffcv", "beton", {}),
    "stock FFCV, workqueue": ("ffcv", "beton", {"layer": "workqueue"}),
}
_TORCHVISION: _Contestants = {"torchvision DataLoader": ("torchvision", "folder", {})}
_BICUBIC: _Contestants = {
    "torchvision DataLoader, bicubic": ("torchvision", "folder", {"interpolation": "bicubic"})
}
_OTHERS: _Contestants = {
    "litdata": ("litdata", "litdata", {}),
    "webdataset": ("webdataset", "webdataset", {}),
    "stock StreamingDataset": ("streaming", "stock_mds", {}),
    "DALI, CPU": ("dali", "folder", {}),
}
_REFERENCES = {
    "× stock FFCV": list(_FFCV),
    "× torchvision": list(_TORCHVISION),
    "× torchvision, bicubic": list(_BICUBIC),
    "× best other": list(_OTHERS),
}


_WRITERS = {
    "ours, MDS": ("mds", "images_mds"),
    "ours, MDS, --check header": ("mds_header", "images_mds"),
    "ours, .beton": ("beton", "images.beton"),
    "MDSWriter, opened files": ("stock_mds", "images_mds"),
    "MDSWriter, images": ("stock_mds_images", "images_mds"),
    "DatasetWriter": ("stock_beton", "images.beton"),
}
_WRITTEN_BESIDE = {
    "× MDSWriter, opened files": ["MDSWriter, opened files"],
    "× MDSWriter, images": ["MDSWriter, images"],
    "× DatasetWriter": ["DatasetWriter"],
}


@dataclass(frozen=True)
class Bench:
    """The settings of a benchmark."""

    data: Path  # the image folder
    work: Path  # where converted data and logs go
    runs: int  # how often everything is measured
    batch_size: int
    num_workers: int  # of every loader

    def job(self, loader: str, data: Path | str, views: Sequence[Views], **options: Any) -> Job:
        return Job(loader, str(data), tuple(views), self.batch_size, self.num_workers, options)

    def prepared(self, kind: str) -> Path:
        return loader_data.prepared(kind, self.data, self.work, self.num_workers)


def one_view(bench: Bench) -> Table:
    """Random resized crops of 224 pixels, one of every image."""
    return _compare(bench, "1×224 RandomResizedCrop (scale .08–1)", ONE_VIEW)


def multi_crop(bench: Bench) -> Table:
    """DINO's ten views of every image."""
    return _compare(bench, "2×224 (scale .32–1) + 8×96 (scale .05–.32)", MULTI_CROP)


def _compare(bench: Bench, title: str, views: Sequence[Views]) -> Table:
    jobs, contestants = {}, _OURS | _FFCV | _TORCHVISION | _BICUBIC | _OTHERS
    for name, (loader, kind, options) in contestants.items():
        try:
            jobs[name] = bench.job(loader, bench.prepared(kind), views, **options)
        except LoaderDied as error:
            leave_out(name, str(error))
    epochs = take_turns(jobs, bench.runs, bench.work)
    firsts = {name: f"{some[0].first_batch or 0:.1f}" for name, some in epochs.items()}
    rows = rate_rows(_rates(epochs), _REFERENCES, {"first batch, s": firsts})
    return Table(f"{title}, original sizes", "images/s", rows)


def decode_bound(bench: Bench) -> Table:
    """How much of what libjpeg-turbo alone decodes comes out as views."""
    mds = bench.prepared("mds")
    limits = {
        "libjpeg-turbo alone, full size": (ONE_VIEW, {}),
        "libjpeg-turbo alone, at the scale of 1×224": (ONE_VIEW, {"at_scale": True}),
        "libjpeg-turbo alone, at the scale of 2×224 + 8×96": (MULTI_CROP, {"at_scale": True}),
    }
    jobs = {
        name: bench.job("turbojpeg", mds, views, **options)
        for name, (views, options) in limits.items()
    }
    jobs["ours, MDS, 1×224"] = bench.job("ours", mds, ONE_VIEW)
    jobs["ours, MDS, 2×224 + 8×96"] = bench.job("ours", mds, MULTI_CROP)
    columns = ("of full size", "of the scale of 1×224", "of the scale of 2×224 + 8×96")
    references = {column: [name] for column, name in zip(columns, limits, strict=True)}
    rates = _rates(take_turns(jobs, bench.runs, bench.work))
    title = f"decoding alone, bytes in memory, {bench.num_workers} threads, and our share of it"
    return Table(title, "images/s", rate_rows(rates, references))


def memory(bench: Bench) -> Table:
    """Our loader's memory over many epochs, beside its own estimate."""
    jobs = {
        name: bench.job("ours", bench.prepared(kind), MULTI_CROP)
        for name, (_, kind, options) in _OURS.items()
        if kind != "seekable" and not options
    }
    rows = []
    for name, epochs in take_turns(jobs, MEMORY_EPOCHS - 1, bench.work).items():
        last = epochs[-1]
        sizes = {
            "its estimate, MB": last.estimate or 0,
            f"growth, epoch 2 to {len(epochs)}, MB": last.resident - epochs[1].resident,
            "whole process, MB": last.peak,
        }
        more = {title: f"{size / 1e6:.0f}" for title, size in sizes.items()}
        rows.append(Row(name, (last.peak - last.before) / 1e6, {}, more))
    title = f"memory at its peak over {MEMORY_EPOCHS} epochs of 2×224 + 8×96, beyond the libraries"
    return Table(title, "MB", rows)


def _rates(epochs: Mapping[str, Sequence[Epoch]]) -> dict[str, list[float]]:
    """Return the rates of all epochs but the first, which warms up."""
    return {name: [epoch.rate for epoch in some[1:]] for name, some in epochs.items()}


def conversion(bench: Bench) -> Table:
    """Write the folder with our command and with the plain use of the stock writers, in turn.

    Each does so in a fresh process; the first time of each warms up. MDSWriter works in one
    process: it copies the bytes of files that Pillow opened, and encodes images from a data set.
    DatasetWriter uses all workers and encodes every image anew. Ours keeps the bytes and adds
    checksums and a manifest. It decodes every JPEG at 1/8 to find damage, or with
    ``--check header`` looks at beginning and end only.
    """
    num_images = sum(1 for path in bench.data.rglob("*") if path.is_file())
    alone: dict[str, list[float]] = {name: [] for name in _WRITERS}
    whole: dict[str, list[float]] = {name: [] for name in _WRITERS}
    for run in range(bench.runs + 1):
        for name, (kind, target) in _WRITERS.items():
            try:
                seconds, all_seconds = _convert(bench, kind, bench.work / "conversion" / target)
            except LoaderDied as error:
                if not run:
                    leave_out(name, str(error))
                continue
            rates = num_images / seconds, num_images / all_seconds
            print(
                f"  run {run}: {name} {rates[0]:.0f} images/s, {rates[1]:.0f} with the start",
                file=sys.stderr,
            )
            if run:
                alone[name].append(rates[0])
                whole[name].append(rates[1])
    start = {name: f"{statistics.median(some):.0f}" for name, some in whole.items() if some}
    more = {"images/s with the start of the process": start}
    title = f"conversion of {num_images} originals by {bench.num_workers} workers"
    return Table(title, "images/s", rate_rows(alone, _WRITTEN_BESIDE, more))


def _convert(bench: Bench, kind: str, target: Path) -> tuple[float, float]:
    """Return the seconds of writing alone and those of the whole process."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    said, seconds = loader_data.write(kind, bench.data, target, bench.num_workers)
    shutil.rmtree(target.parent)
    return seconds_alone(said), seconds


def seconds_alone(said: str) -> float:
    """Return the seconds of writing that a conversion printed at its end.

    Our command prints ``814 images`` in one line and ``… s (1234 images/s)`` in another.
    """
    rate = re.search(r"\(([\d.]+) images/s\)", said)
    if rate:
        count = re.search(r"^ +images +(\d+)$", said, re.MULTILINE)
        assert count is not None, said
        return int(count[1]) / float(rate[1])
    return float(json.loads(said.splitlines()[-1])["seconds"])


def from_s3(bench: Bench) -> Table:
    """Two epochs of each loader from an S3 server on this machine: one fetches, one does not.

    The server, SeaweedFS, takes its share of the cores, which a real bucket does not, so the first
    epoch is slower than from a network that is as fast. Both loaders read the same small shards,
    with an empty cache in every run. The first epoch counts from asking for it, in a process that
    has just built its loader.
    """
    if weed() is None:
        raise UserError(NO_WEED)
    shards, cache = bench.prepared("small_mds"), bench.work / "s3_cache"
    remote = "s3://bucket/images"
    jobs = {
        "ours, s3://": bench.job("ours", remote, ONE_VIEW, cache_dir=str(cache)),
        "stock StreamingDataset, s3://": bench.job("streaming", cache, ONE_VIEW, remote=remote),
        "ours, local": bench.job("ours", shards, ONE_VIEW),
        "stock StreamingDataset, local": bench.job("streaming", shards, ONE_VIEW),
    }
    rates: dict[str, list[float]] = {f"{name}, epoch {n}": [] for name in jobs for n in (1, 2)}
    with tempfile.TemporaryDirectory() as folder, seaweed(Path(folder, "weed")) as server:
        for path in sorted(shards.iterdir()):
            server.client.upload_file(str(path), "bucket", f"images/{path.name}")
        for run in range(bench.runs + 1):
            for name, job in jobs.items():
                shutil.rmtree(cache, ignore_errors=True)
                for number, rate in enumerate(_two_epochs(job, bench.work, access(server.url)), 1):
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
    return Table(title, "images/s", rate_rows(rates, references))


def _two_epochs(job: Job, folder: Path, extra: dict[str, str]) -> tuple[float, float]:
    worker = Worker(job, folder / f"{os.getpid()}-s3.log", extra)
    try:
        return worker.first.rate, worker.epoch().rate
    finally:
        worker.close()
