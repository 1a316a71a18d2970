"""How many images per second our loader gives beside stock FFCV and torchvision.

    python tests/benchmarks/bench_loader.py photographs              # an ImageFolder of originals
    python tests/benchmarks/bench_loader.py photographs --runs 9 --output loader.json

One random view of 224 pixels per image, from the same files at their original size, on the same
cores. The loaders take turns (one epoch each, again and again), so that a machine whose speed
drifts favours none; the first epoch of each warms up and does not count. What each does:

  ours         box, bicubic antialiased resize and flip decision; from .beton, MDS and the folder
  ffcv         Loader with RandomResizedCropRGBImageDecoder (area resize), ToTensor; no flip
  torchvision  DataLoader, ImageFolder, RandomResizedCrop (bilinear), flip, PILToTensor; processes
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from data_prep import convert
from pospre.data.cores import available_cores
from pospre.data.loader import build_loader
from pospre.data.views import ViewGroup
from pospre.errors import UserError, run_command

Epoch = Callable[[], Iterable[Any]]
SIZE = 224
SCALE = (0.08, 1.0)
PEERS = ("ffcv", "torchvision")


def our_epochs(path: Path, batch_size: int, num_workers: int) -> Epoch:
    """Return a function that starts an epoch of our loader."""
    loader = build_loader(
        path,
        views=[ViewGroup(size=SIZE, scale=SCALE)],
        batch_size=batch_size,
        seed=0,
        drop_last=False,
        num_workers=num_workers,
    )

    def epoch() -> Iterable[Any]:
        loader.epoch += 1
        return (batch["view/image"] for batch in loader)

    return epoch


def ffcv_epochs(path: Path, batch_size: int, num_workers: int) -> Epoch:
    """Return a function that starts an epoch of stock FFCV, on all its workers."""
    import numba
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor

    # With numba's first choice, TBB, FFCV was seen to decode on one core whatever num_workers is.
    numba.config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]
    loader = Loader(
        str(path),
        batch_size=batch_size,
        num_workers=num_workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        pipelines={
            "image": [RandomResizedCropRGBImageDecoder((SIZE, SIZE), scale=SCALE), ToTensor()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return lambda: (batch[0] for batch in loader)


def torchvision_epochs(path: Path, batch_size: int, num_workers: int) -> Epoch:
    """Return a function that starts an epoch of torchvision's usual pipeline."""
    steps = [
        transforms.RandomResizedCrop(SIZE, scale=SCALE),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
    ]
    loader = DataLoader(
        ImageFolder(str(path), transforms.Compose(steps)),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=True,
    )
    return lambda: (batch[0] for batch in loader)


def converted(folder: Path, work: Path, data_format: str) -> Path:
    """Convert the folder (original bytes kept) unless that was done before."""
    target = work / ("images.beton" if data_format == "ffcv" else "images_mds")
    if not target.exists():
        print(f"converting to {target} …", file=sys.stderr)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = convert.main([str(folder), str(target), "--format", data_format])
        if code:
            raise UserError(f"{folder} could not be converted:\n{said.getvalue()}")
    return target


def contestants(folder: Path, work: Path, batch_size: int, num_workers: int) -> dict[str, Epoch]:
    """Return every loader that runs on this machine; without FFCV, those that do not need it."""
    settings = (batch_size, num_workers)
    found = {
        "ours, MDS": our_epochs(converted(folder, work, "mds"), *settings),
        "ours, folder": our_epochs(folder, *settings),
        "torchvision": torchvision_epochs(folder, *settings),
    }
    try:
        import ffcv  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"no .beton: FFCV cannot be imported ({error})", file=sys.stderr)
        return found
    beton = converted(folder, work, "ffcv")
    return {
        "ours, .beton": our_epochs(beton, *settings),
        **found,
        "ffcv": ffcv_epochs(beton, *settings),
    }


def measure(loaders: dict[str, Epoch], runs: int) -> dict[str, list[float]]:
    """Return images per second of each loader in each run."""
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for run in range(runs + 1):
        for name, epoch in loaders.items():
            start = time.perf_counter()
            num_images = sum(len(images) for images in epoch())
            rate = num_images / (time.perf_counter() - start)
            if run:
                rates[name].append(rate)
            note = f"run {run}" if run else "warm-up"
            print(f"  {note}: {name} {rate:.0f} images/s", file=sys.stderr)
    return rates


def summary(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row per loader: the median rate, and the median of its ratio to each peer's rate."""
    rows = []
    for name, values in rates.items():
        row: dict[str, Any] = {"loader": name, "images_per_s": statistics.median(values)}
        for peer in PEERS:
            pairs = zip(values, rates.get(peer, ()), strict=False)
            ratios = [ours / theirs for ours, theirs in pairs]
            row[f"times_{peer}"] = statistics.median(ratios) if ratios else None
        rows.append({**row, "runs": values})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table to read."""
    lines = ["| loader | images/s | × stock FFCV | × torchvision |", "|---|---|---|---|"]
    for row in rows:
        ratios = [row[f"times_{peer}"] for peer in PEERS]
        cells = ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {row['loader']} | {row['images_per_s']:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the table; write JSON with --output."""
    num_cores = available_cores()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder of images in class sub-folders")
    parser.add_argument("--runs", type=int, default=5, help="epochs of each loader (5)")
    parser.add_argument("--batch", type=int, default=32, help="images per batch (32)")
    parser.add_argument("--workers", type=int, default=num_cores, help="of each loader (the cores)")
    parser.add_argument("--work", type=Path, help="folder for the converted data sets, kept")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        loaders = contestants(options.data, work, options.batch, options.workers)
        rows = summary(measure(loaders, options.runs))
    print(
        f"1 view of {SIZE}, original sizes, batch {options.batch}, {options.workers} workers on "
        f"{num_cores} cores; medians of {options.runs} epochs taken in turn\n"
    )
    print(markdown(rows))
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
