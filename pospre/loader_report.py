"""``python -m pospre.loader_report RECIPE [key=value …]``: what loading costs, and why."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pospre.config import Recipe, load_recipe
from pospre.errors import UserError, run_command

if TYPE_CHECKING:
    from pospre.data.loader import ViewLoader

_EPILOG = """\
examples:
  python -m pospre.loader_report yamls/demo/droppos.yaml data.path=photos
  python -m pospre.loader_report yamls/pretrain/intertwined_vitb16.yaml data.path=in1k.beton \\
      --feed 4000 --output bill.json

All of the recipe's threads load --images samples, as in training. Then one core does it alone, and
every stage is timed: drawing places (plan), reading, decoding, cutting and resizing, the copy to
the device, and the device's changes of the pixels (augment).

exit codes: 0 done, 2 a mistake in the recipe or the data (said in one message).
"""
STAGES = ("read", "decode", "resize", "plan", "augment", "copy", "other")
_LARGE = 4.0  # times more pixels than views need: worth storing smaller
_SLOW_READ = 0.2  # share of the time
_HEAVY = 4.0  # bits per pixel; JPEGs of quality 90 have about 2 to 3


@dataclass
class LoaderBill:
    """What loading costs, for one recipe on this machine.

    Attributes:
        path: the data set.
        format: of the data set.
        samples: in the data set.
        views: per image.
        images: timed.
        seconds: of one core's work on these, from the first to the last.
        stages: seconds by stage; they add up to ``seconds``.
        workers: threads of the recipe.
        loaded_per_s: images per second with these threads, when nothing else runs.
        bytes_per_image: encoded.
        pixels_per_image: in full size.
        pixels_needed: per image: the full-size pixels that the largest view needs.
        is_remote: whether the data come from an object store.
        advice: what would make it cheaper.
    """

    path: str
    format: str
    samples: int
    views: int
    images: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    workers: int = 0
    loaded_per_s: float = 0.0
    bytes_per_image: float = 0.0
    pixels_per_image: float = 0.0
    pixels_needed: float = 0.0
    is_remote: bool = False
    advice: list[str] = field(default_factory=list)

    @property
    def per_core(self) -> float:
        """Images per second of one core, without the device's part."""
        loading = sum(self.stages[stage] for stage in ("read", "decode", "resize", "plan"))
        return self.images / loading

    @property
    def bytes_per_epoch(self) -> float:
        """Encoded bytes of all samples."""
        return self.bytes_per_image * self.samples


def make_bill(recipe: Recipe, num_images: int) -> LoaderBill:
    """Measure what loading costs.

    Args:
        recipe: of a training; its data, views, seed and device count.
        num_images: to work through, twice.

    Raises:
        UserError: the data cannot be read, or are too few.
    """
    from pospre.training.build import build_data

    loader = build_data(recipe)
    bill = LoaderBill(
        path=str(recipe.data.path),
        format=loader.reader.format,
        samples=loader.num_samples,
        views=sum(group.count for group in loader.views),
        workers=loader.num_workers,
        is_remote="://" in recipe.data.path,
    )
    batches = min(len(loader), 2 + -(-num_images // loader.batch_size))
    if batches < 2:
        raise UserError(
            f"{recipe.data.path} holds {loader.num_samples} samples, not two batches of "
            f"{loader.batch_size}; try data.batch_size={max(1, loader.num_samples // 2)}"
        )
    _time_threads(loader, batches, bill)
    _time_stages(recipe, loader, batches, bill)
    _look_at_sizes(loader, bill)
    bill.advice = advice(bill)
    return bill


def _time_stages(recipe: Recipe, loader: "ViewLoader", batches: int, bill: LoaderBill) -> None:
    """Work through some batches on one core; the first one only warms up."""
    import torch

    from pospre.data.views import first_view
    from pospre.pretrain.augment import IMAGENET_MEAN, IMAGENET_STD, DeviceAugment, ViewDraws
    from pospre.training.build import build_device

    device = torch.device("cuda" if build_device(recipe).name == "gpu" else "cpu")
    mean, std = recipe.data.mean or IMAGENET_MEAN, recipe.data.std or IMAGENET_STD
    augment = DeviceAugment(mean, std).to(device)
    loader.num_workers, loader.epoch = 0, 1
    spent = dict.fromkeys(STAGES, 0.0)
    start, before, seen = 0.0, dict(loader.bill.seconds), 0

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for number, batch in enumerate(islice(loader, batches)):
        loaded = clock()
        moved = {key: value.to(device) for key, value in batch.items()}
        copied = clock()
        if loader.reader.features is None:
            for group in loader.views:
                first = first_view(loader.views, group.name)
                source = ViewDraws(recipe.seed, moved["epoch"], moved["index"], first, group.count)
                pixels, flips = moved[f"{group.name}/image"], moved[f"{group.name}/flip"]
                augment(pixels, flips, group.augment, source)
        changed = clock()
        if number == 0:
            start, before = time.perf_counter(), dict(loader.bill.seconds)
            continue
        seen += len(batch["index"])
        spent["copy"] += copied - loaded
        spent["augment"] += changed - copied
    bill.seconds = time.perf_counter() - start
    for stage in ("read", "decode", "resize", "plan"):
        spent[stage] = loader.bill.seconds[stage] - before[stage]
    spent["other"] = max(0.0, bill.seconds - sum(spent.values()))
    bill.stages, bill.images = spent, seen


def _time_threads(loader: "ViewLoader", batches: int, bill: LoaderBill) -> None:
    """Let the recipe's threads work as in training, for a consumer that costs nothing."""
    iterator = iter(loader)
    next(iterator)
    start, seen = time.perf_counter(), 0
    for batch in islice(iterator, batches - 1):
        seen += len(batch["index"])
    bill.loaded_per_s = seen / (time.perf_counter() - start)
    bill.bytes_per_image = loader.bill.num_bytes / loader.bill.num_images


def _look_at_sizes(loader: "ViewLoader", bill: LoaderBill, num_samples: int = 64) -> None:
    """Compare the images' pixels with what the views need of them."""
    import numpy as np

    from pospre.data.decode import OpenedImage

    if loader.reader.features is not None:
        return
    places = np.linspace(0, loader.num_samples - 1, min(num_samples, loader.num_samples))
    sizes = []
    loader.reader.expect(places.astype(np.int64))  # remote samples come only when they are expected
    with closing(loader.reader):
        for index in places.astype(int).tolist():
            image = OpenedImage(loader.reader.read(index).encoded)
            sizes.append(image.width * image.height)
    bill.pixels_per_image = float(np.mean(sizes))
    # A view that covers the share s of an image needs its own pixels / s of the whole.
    bill.pixels_needed = max(
        group.shape[0] * group.shape[1] / (group.scale[0] if group.crop == "random" else 1.0)
        for group in loader.views
    )


def advice(bill: LoaderBill) -> list[str]:
    """Return what would make loading cheaper, the most effective first."""
    found = []
    share = {stage: seconds / bill.seconds for stage, seconds in bill.stages.items()}
    if bill.pixels_needed and bill.pixels_per_image > _LARGE * bill.pixels_needed:
        side = _rounded_side(bill.pixels_needed)
        factor = bill.pixels_per_image / bill.pixels_needed
        found.append(
            f"images have {factor:.0f} times the pixels that the smallest crops need at full "
            f"detail: convert with --max-side {side} (decode is {share['decode']:.0%} of the time)"
        )
    if bill.pixels_per_image and 8 * bill.bytes_per_image / bill.pixels_per_image > _HEAVY:
        bits = 8 * bill.bytes_per_image / bill.pixels_per_image
        found.append(
            f"{bits:.1f} bits per pixel: undoing the entropy coding costs most; JPEGs of --quality "
            "90 have about 2.5 (PNGs are converted to JPEG)"
        )
    if bill.format == "folder":
        found.append(
            "a folder is read file by file: convert to .beton or MDS (make data), which is what "
            "network file systems and object stores need"
        )
    elif share["read"] > _SLOW_READ:
        found.append(
            f"reading is {share['read']:.0%} of the time: try data.page_cache: process, a local "
            "copy, or a second epoch (the first one fills the caches)"
        )
    if bill.is_remote:
        found.append(
            "every machine downloads the data once if data.cache_limit is above "
            f"{bill.bytes_per_epoch / 1e9:.1f} GB, else every epoch; data.order: windows needs few "
            "shards at a time"
        )
    if share["augment"] > 0.3:
        found.append(
            f"the device's changes of the pixels are {share['augment']:.0%} of the time on this "
            "device; on a GPU they are a small part of the step"
        )
    return found


def _rounded_side(pixels: float) -> int:
    """Return the longer side of a 4:3 image with so many pixels, rounded up to 32."""
    return int(-(-((pixels * 4 / 3) ** 0.5) // 32) * 32)


def table(bill: LoaderBill, feed: float | None) -> str:
    """Return the bill as text.

    Args:
        bill: what was measured.
        feed: images per second that the trainers of one machine take; None: say it for some.
    """
    from pospre.evaluation.table import format_table

    rows = [
        (stage, f"{1e6 * bill.stages[stage] / bill.images:.0f}", _share(bill, stage))
        for stage in STAGES
    ]
    rows.append(("together", f"{1e6 * bill.seconds / bill.images:.0f}", "100.0 %"))
    rates = [feed] if feed is not None else [1000.0, 4000.0, 16000.0]
    cores = ", ".join(f"{rate / bill.per_core:.1f} for {rate:.0f} images/s" for rate in rates)
    epoch = bill.bytes_per_epoch / 1e9
    views = bill.per_core * bill.views
    notes = [
        "",
        f"one core loads      {bill.per_core:.0f} images/s ({views:.0f} views/s)",
        f"{bill.workers} threads load      {bill.loaded_per_s:.0f} images/s",
        f"cores needed        {cores}",
        f"bytes               {bill.bytes_per_image / 1e3:.1f} kB an image, {epoch:.2f} GB an epoch"
        + (", downloaded by every machine" if bill.is_remote else ""),
    ]
    if feed is not None:
        waits = max(0.0, 1 - bill.loaded_per_s / feed)
        notes.append(f"wait                {waits:.0%} of the time at {feed:.0f} images/s")
    notes += ["", *(f"- {line}" for line in bill.advice)]
    title = (
        f"{bill.path} ({bill.format}, {bill.samples} samples): {bill.views} views an image, "
        f"{bill.images} images timed on one core"
    )
    return format_table(title, ("stage", "µs an image", "share"), rows, notes)


def _share(bill: LoaderBill, stage: str) -> str:
    return f"{100 * bill.stages[stage] / bill.seconds:.1f} %"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pospre.loader_report",
        description="Where the loader's time goes for a recipe, what it takes to feed a trainer, "
        "and what would make it cheaper.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="YAML file; see yamls/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the recipe")
    parser.add_argument("--images", type=int, default=500, help="samples to time (500)")
    parser.add_argument("--feed", type=float, help="images/s that the GPUs of a machine take")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write JSON")
    arguments = parser.parse_intermixed_args(argv)
    for name in ("images", "feed"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} is {value}; give a number above 0.")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    bill = make_bill(recipe, arguments.images)
    print(table(bill, arguments.feed))
    if arguments.output:
        document = {**asdict(bill), "per_core": bill.per_core}
        document["bytes_per_epoch"] = bill.bytes_per_epoch
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
