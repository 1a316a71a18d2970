"""Sizes, aspect ratios, bytes and classes of a data set, as a table and a picture."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.distribute.ordered_maps import over_samples
from data_prep.plan.records import Moments, Record
from pospre.command_line import LocalPath, command_parser
from pospre.data.decode.bit_depth import DeepRange, parse_range
from pospre.data.threads import available_cores
from pospre.errors import UserError, printable, run_command
from pospre.output import check_picture, save_picture

_EPILOG = """\
examples:
  python -m data_prep.statistics photos.beton
  python -m data_prep.statistics photos_mds --picture photos.png

  python -m data_prep.statistics scans --channels 1 --deep-range=-1024,3072

DST is a data set of any storage format, or a folder of images. Only the headers of images are read.
With --channels every image is decoded, and mean and standard deviation of each channel are printed
as in a recipe. data_prep.convert prints the same table.
"""

_HEADS = ("mean", "min", "5 %", "median", "95 %", "max")
_MOST_TICKS = 5
_LONGEST_NAME = 40
_MOST_CLASSES = 40  # maximal number named in a picture


@dataclass(frozen=True)
class Statistics:
    """Statistics with one entry per sample."""

    sides: np.ndarray  # width and height, int64 (N, 2); (0, 2) if the samples are not images
    num_bytes: np.ndarray  # int64 (N,)
    labels: np.ndarray  # int64 (N,), -1 if unknown
    seconds: np.ndarray  # of clips, float64 (N,); empty for images
    classes: list[str] | None  # names by label, or None
    num_unreadable: int = 0  # number of samples with unreadable headers
    moments: Moments | None = None  # of the channels, from 0 to 1; None: images were not decoded

    def quantities(self) -> dict[str, np.ndarray]:
        """Return the quantities that have a distribution, by name."""
        columns: dict[str, np.ndarray] = {}
        if len(self.sides):
            width, height = self.sides.T
            columns |= {"width": width, "height": height, "width / height": width / height}
        if len(self.seconds):
            columns["seconds"] = self.seconds
        columns["bytes"] = self.num_bytes
        if self.classes:
            columns["samples in a class"] = self.per_class()
        return columns

    def per_class(self) -> np.ndarray:
        """Return the number of samples per class."""
        known = self.labels[self.labels >= 0]
        return np.bincount(known, minlength=len(self.classes or []))


def of_records(records: Sequence[Record], classes: list[str] | None) -> Statistics:
    """Return the statistics of a conversion's records."""

    def joined(name: str, kind: type) -> np.ndarray:
        values = [value for record in records for value in getattr(record, name)]
        return np.array(values, kind)

    return Statistics(
        sides=joined("sides", np.int64).reshape(-1, 2),
        num_bytes=joined("num_bytes", np.int64),
        labels=joined("labels", np.int64),
        seconds=joined("seconds", np.float64),
        classes=classes,
    )


def of_data_set(
    path: str | Path,
    num_workers: int | None = None,
    channels: int | None = None,
    deep_range: DeepRange | None = None,
) -> Statistics:
    """Read the headers of a data set's samples; with ``channels`` decode to that many."""
    # late imports, so that --help is fast
    from pospre.data.decode.decoder import DecodeError, OpenedImage
    from pospre.data.opening import open_reader

    reader = open_reader(
        path,
        channels=channels,
        deep_range=(deep_range.low, deep_range.high) if deep_range else "auto",
    )

    def look(index: int) -> tuple[tuple[int, int, int, int], list[list[float]]]:
        sample, sides, moments = reader.read(index), (0, 0), Moments(channels or 0)
        try:
            if reader.features is None:
                image = OpenedImage(sample.encoded, reader.decoding)
                sides = image.width, image.height
                if channels is not None:
                    moments.add(image.decode()[0].reshape(-1, channels) / 255)
        except DecodeError as error:
            if channels is not None:
                raise UserError(f"{reader.name(index)} cannot be decoded: {error}.") from error
            sides = -1, -1
        return (*sides, sample.encoded.nbytes, sample.label), moments.sums()

    rows, total = [], Moments(channels or 0)
    for row, sums in over_samples(look, reader, num_workers or available_cores(), "statistics"):
        rows.append(row)
        total.add_sums(sums)
    table = np.array(rows, np.int64)
    good = table[:, 0] >= 0
    return Statistics(
        sides=table[good, :2] if reader.features is None else table[:0, :2],
        num_bytes=table[:, 2],
        labels=table[:, 3],
        seconds=np.zeros(0),
        classes=reader.classes,
        num_unreadable=int((~good).sum()),
        moments=None if channels is None else total,
    )


def print_table(statistics: Statistics) -> None:
    """Print mean and percentiles of every quantity, and facts about classes."""
    if not len(statistics.labels):
        return
    print(f"  {'':<20}" + "".join(f"{head:>10}" for head in _HEADS))
    for name, values in statistics.quantities().items():
        numbers = (values.mean(), values.min(), *np.percentile(values, (5, 50, 95)), values.max())
        digits = 2 if values.dtype.kind == "f" else 0
        cells = [f"{number:>10.{digits}f}" for number in numbers]
        if digits == 0 and values.mean() < 10:
            cells[0] = f"{values.mean():>10.1f}"
        print(f"  {name:<20}" + "".join(cells))
    for name, text in _class_rows(statistics):
        print(f"  {name:<20}{printable(text)}")
    if statistics.num_unreadable:
        print(f"  {'unreadable':<20}{statistics.num_unreadable}")


def _class_rows(statistics: Statistics) -> list[tuple[str, str]]:
    classes = statistics.classes
    num_unlabelled = int((statistics.labels < 0).sum())
    if not classes:
        return [("classes", "none")]
    from pospre.data.stores.image_folder import describe_classes  # late: it imports torch

    counts = statistics.per_class()
    few, many = int(counts.argmin()), int(counts.argmax())
    rows = [
        ("classes", f"{len(classes)}"),
        ("  with samples", describe_classes(classes, statistics.labels.tolist())),
        ("  smallest", f"{classes[few]} ({counts[few]})"),
        ("  largest", f"{classes[many]} ({counts[many]})"),
    ]
    if (counts == 0).any():
        rows.append(("  without samples", f"{int((counts == 0).sum())}"))
    return [*rows, ("unlabelled", f"{num_unlabelled}")]


def draw(statistics: Statistics, path: Path, title: str) -> None:
    """Draw a histogram of every quantity, and the sizes of the classes."""
    from matplotlib.figure import Figure  # no pyplot: it could open a window
    from matplotlib.ticker import EngFormatter, MaxNLocator

    quantities = statistics.quantities()
    counts = quantities.pop("samples in a class", None)
    num_rows, num_columns = 1 + (counts is not None), len(quantities)
    figure = Figure(figsize=(4 * num_columns, 3.4 * num_rows), layout="constrained")
    grid = figure.add_gridspec(num_rows, num_columns)
    for column, (name, values) in enumerate(quantities.items()):
        axis = figure.add_subplot(grid[0, column])
        top = np.percentile(values, 99.5)  # a few huge values would flatten all others
        axis.hist(values[values <= top], bins=60, color="tab:blue")
        axis.set(xlabel=name, ylabel="samples")
        axis.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS))  # more labels would overlap
        if name == "bytes":
            axis.xaxis.set_major_formatter(EngFormatter())
    if counts is not None:
        _draw_classes(figure.add_subplot(grid[1, :]), counts, statistics.classes or [])
    figure.suptitle(f"{printable(title)}: {len(statistics.labels)} samples")
    save_picture(figure, path, dpi=110)
    print(f"drew {printable(path)}")


def _draw_classes(axis: Any, counts: np.ndarray, classes: list[str]) -> None:
    order = np.argsort(-counts, kind="stable")
    axis.bar(np.arange(len(counts)), counts[order], width=1.0, color="tab:orange")
    axis.set(xlabel="classes, largest first", ylabel="samples")
    if len(classes) <= _MOST_CLASSES:
        names = [printable(classes[i])[:_LONGEST_NAME] for i in order]
        axis.set_xticks(range(len(classes)), names, rotation=90, fontsize=7)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = command_parser("data_prep.statistics", __doc__, _EPILOG)
    parser.add_argument("path", metavar="DST", help="data set, or folder of images")
    parser.add_argument("--picture", action=LocalPath, metavar="PATH.png", help="picture to write")
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="threads (all cores)"
    )
    parser.add_argument("--channels", type=int, metavar="N", help="decode to N channels")
    parser.add_argument(
        "--deep-range", default="auto", metavar="auto|LOW,HIGH", help="as in data_prep.convert"
    )
    args = parser.parse_args(argv)
    check_picture("--picture", args.picture)
    if args.channels is not None and args.channels < 1:
        raise UserError(f"--channels {args.channels} is out of range; it must be at least 1.")
    wanted = parse_range(args.deep_range, "--deep-range")
    statistics = of_data_set(args.path, max(1, args.workers), args.channels, wanted)
    print(f"{printable(args.path)}: {len(statistics.labels)} samples")
    print_table(statistics)
    if args.picture is not None:
        draw(statistics, args.picture, str(args.path))
    if statistics.moments is not None:
        moments = statistics.moments.describe()
        print(
            " ".join(f"data.{key}={numbers}".replace(" ", "") for key, numbers in moments.items())
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
