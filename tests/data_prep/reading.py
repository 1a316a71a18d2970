"""Convert, and read the result with the stock libraries, for comparison with the source."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep import convert
from pospre.errors import run_command
from tests.libraries import needs_ffcv

FORMATS = ("mds", "ffcv")
Says = Callable[..., str]


def call(*arguments: object) -> int:
    """Run the command; return its exit code."""
    return run_command(lambda: convert.main([str(argument) for argument in arguments]))


def run(source: Path, target: Path | str, *options: object, workers: int = 1) -> int:
    """Convert to the format that the target's name asks for."""
    data_format = "ffcv" if str(target).endswith(".beton") else "mds"
    return call(source, target, "--format", data_format, "--workers", workers, *options)


def converted(source: Path, target: Path, *options: object) -> Path:
    """Convert without a word to the format that the target's name asks for; return the target."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(source, target, *options) == 0
    return target


def in_format(source: Path, data_format: str, *options: object) -> Path:
    """An image folder in a format, made once beside it; skips where FFCV cannot be loaded."""
    if data_format == "folder":
        return source
    name = source.name if data_format == "ffcv" else f"{source.name}_mds"
    target = destination(source.parent, data_format, name)
    return target if target.exists() else converted(source, target, *options)


def partial(target: Path) -> Path:
    """The folder of the finished blocks."""
    return target.with_name(f"{target.name}.partial")


def sidecar(target: Path) -> Path:
    """The description of a data set."""
    return target / "pospre.json" if target.is_dir() else Path(f"{target}.json")


def description(target: Path) -> dict[str, Any]:
    return json.loads(sidecar(target).read_text())


def destination(folder: Path, data_format: str, name: str = "out") -> Path:
    """Where to write a data set of a format; skips the test where FFCV cannot be loaded."""
    if data_format == "ffcv":
        needs_ffcv()
        return folder / f"{name}.beton"
    return folder / name


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Every sample's JPEG bytes and label (and path, in MDS), read by Streaming or FFCV."""
    return _read_mds(path) if path.is_dir() else _read_beton(path)


def _read_mds(path: Path) -> list[dict[str, Any]]:
    from streaming.base.format import reader_from_json

    shards = json.loads((path / "index.json").read_text())["shards"]
    readers = [reader_from_json(str(path), "", shard) for shard in shards]
    return [dict(reader[index]) for reader in readers for index in range(len(reader))]


def _read_beton(path: Path) -> list[dict[str, Any]]:
    from ffcv.reader import Reader

    reader = Reader(str(path))
    assert reader.field_names == ["image", "label"]
    data = path.read_bytes()
    sizes = {int(entry["ptr"]): int(entry["size"]) for entry in reader.alloc_table}
    samples = []
    for record in reader.metadata:
        image, label = record[0], record[1]
        start = int(image["data_ptr"])
        samples.append({"image": data[start : start + sizes[start]], "label": int(label)})
    return samples
