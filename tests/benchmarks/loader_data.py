"""The image folder in every format that a loader wants, written once; and the peers' plain writers.

    python -m tests.benchmarks.loader_data litdata photographs chunks --workers 2

Run as a command, in a process of its own, it writes one format with a peer's own writer, used as
its documentation shows, and prints the seconds that the writing took (not counting imports).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.benchmarks.loader_worker import ROOT, LoaderDied, environment

SMALL_SHARD = 1 << 23  # bytes: so that a few hundred photographs are a dozen shards
_OURS = {
    "mds": ("--format", "mds"),
    "mds_header": ("--format", "mds", "--check", "header"),
    "beton": ("--format", "ffcv"),
    "seekable": ("--format", "ffcv", "--seekable"),
}


def command(kind: str, source: Path, target: Path, num_workers: int) -> list[str]:
    places = [str(source), str(target), "--workers", str(num_workers)]
    if kind in _OURS:
        return [sys.executable, "-m", "data_prep.convert", *places, *_OURS[kind]]
    return [sys.executable, "-m", "tests.benchmarks.loader_data", kind, *places]


def write(kind: str, source: Path, target: Path, num_workers: int) -> tuple[str, float]:
    """Write ``source`` as ``kind`` in a fresh process; return what it printed, and its seconds.

    Raises:
        LoaderDied: it failed; the message is the end of what it said.
    """
    start = time.perf_counter()
    done = subprocess.run(
        command(kind, source, target, num_workers),
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise LoaderDied(f"{source} could not be written as {kind}:\n{done.stdout}{done.stderr}")
    return done.stdout, seconds


def prepared(kind: str, source: Path, work: Path, num_workers: int) -> Path:
    """Return the folder or file that holds ``source`` as ``kind``, written unless it is there."""
    if kind == "folder":
        return source
    names = {"beton": "images.beton", "seekable": "images_seekable.beton"}
    target = work / names.get(kind, f"images_{kind}")
    if not target.exists():
        print(f"writing {target} …", file=sys.stderr)
        if kind in _OURS:  # appears when it is complete
            write(kind, source, target, num_workers)
        else:
            partial = target.with_name(f"partial-{target.name}")
            shutil.rmtree(partial, ignore_errors=True)
            write(kind, source, partial, num_workers)
            partial.rename(target)
    return target


def _files(source: Path) -> list[tuple[str, int]]:
    """Return path and class of every image, as torchvision's ImageFolder lists them."""
    from torchvision.datasets import ImageFolder

    return ImageFolder(str(source)).samples


def _read_lit(sample: tuple[str, int]) -> dict[str, Any]:
    from PIL import Image

    path, label = sample
    return {"image": Image.open(path), "class": label}


def write_litdata(source: Path, target: Path, num_workers: int) -> None:
    """Write chunks with ``litdata.optimize``; JPEGs keep their bytes."""
    from litdata import optimize

    optimize(
        fn=_read_lit,
        inputs=_files(source),
        output_dir=str(target),
        chunk_bytes="64MB",
        num_workers=num_workers,
    )


def write_webdataset(source: Path, target: Path, num_workers: int) -> None:
    """Write tar files with ``webdataset.ShardWriter``: four for each worker that will read them."""
    import webdataset

    files = _files(source)
    target.mkdir()
    per_shard = -(-len(files) // (4 * num_workers))
    with webdataset.ShardWriter(str(target / "%06d.tar"), maxcount=per_shard, verbose=0) as writer:
        for number, (path, label) in enumerate(files):
            jpeg = Path(path).read_bytes()
            writer.write({"__key__": f"{number:08d}", "jpg": jpeg, "cls": label})


def write_stock_mds(
    source: Path,
    target: Path,
    num_workers: int,
    *,
    loaded: bool = False,
    size_limit: int | str = "64mb",
) -> None:
    """Write with Streaming's ``MDSWriter``, in one process.

    It copies the bytes of opened files. Images in memory (``loaded``), as data sets give them, it
    encodes.
    """
    from PIL import Image
    from streaming import MDSWriter
    from torchvision.datasets import ImageFolder

    columns = {"image": "jpeg", "label": "int"}
    opened = ((Image.open(path), label) for path, label in _files(source))
    with MDSWriter(out=str(target), columns=columns, size_limit=size_limit) as writer:
        for image, label in ImageFolder(str(source)) if loaded else opened:
            writer.write({"image": image, "label": label})


def write_stock_beton(source: Path, target: Path, num_workers: int) -> None:
    """Write a ``.beton`` with FFCV's ``DatasetWriter``, which encodes every image anew."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    writer = DatasetWriter(str(target), fields, num_workers=num_workers)
    writer.from_indexed_dataset(ImageFolder(str(source)))


_WRITERS: dict[str, Callable[[Path, Path, int], None]] = {
    "litdata": write_litdata,
    "webdataset": write_webdataset,
    "stock_mds": write_stock_mds,
    "stock_mds_images": partial(write_stock_mds, loaded=True),
    # shards so small that fetching and using them can overlap
    "small_mds": partial(write_stock_mds, size_limit=SMALL_SHARD),
    "stock_beton": write_stock_beton,
}
_PACKAGES = {"litdata": "litdata", "webdataset": "webdataset", "stock_beton": "ffcv.writer"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one format; print the seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=_WRITERS)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    import_module("torchvision.datasets")  # beforehand: it is the writing that is timed
    import_module(_PACKAGES.get(options.kind, "streaming"))
    start = time.perf_counter()
    _WRITERS[options.kind](options.source, options.target, options.workers)
    print(json.dumps({"seconds": time.perf_counter() - start}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
