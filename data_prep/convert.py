"""Convert a data set into one file (.beton) or a folder of MDS shards, here or in a bucket."""

import argparse
import io
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from data_prep.plan.records import Settings, Summary

# slow imports are late, so that --help is fast
from data_prep.sources import KINDS
from pospre.command_line import LocalPath, check_exists, command_parser
from pospre.data.decode.bit_depth import parse_range
from pospre.data.threads import available_cores
from pospre.errors import UserError, printable, run_command

_EPILOG = """\
examples:
  python -m data_prep.convert photos photos.beton --format ffcv
  python -m data_prep.convert photos photos_mds --format mds --max-side 512 --verify
  python -m data_prep.convert photos train.beton --format ffcv --split train --val-fraction 0.1
  python -m data_prep.convert photos val.beton   --format ffcv --split val   --val-fraction 0.1
  python -m data_prep.convert words  words_train --format mds  --split train
  python -m data_prep.convert words  12_train    --format mds  --split train --keywords 12
  python -m data_prep.convert photos s3://bucket/photos --format mds

on several machines, with the same SRC (also the same file times) and a DST on a shared disk or in
a bucket; then merge once:
  python -m data_prep.convert photos /shared/photos_mds --format mds --part 3/16
  python -m data_prep.convert --merge /shared/photos_mds

or on a Dask cluster whose workers see SRC and DST under the same names:
  python -m data_prep.convert photos /shared/photos_mds --format mds --scheduler tcp://head:8786

DST appears only when complete. Its bytes depend only on SRC and the options, not on workers, parts
or interruptions. Until then finished blocks (shards of about 64 MiB) are kept in DST.partial, or in
the bucket. If a conversion is killed, run the same command again to resume. Endpoint and
credentials of a bucket come from S3_ENDPOINT_URL and AWS's variables.

kinds of sources:
"""

_NUM_SHOWN = 20


def _print_summary(destination: str, summary: Summary) -> None:
    from data_prep.statistics import of_records, print_table

    content, records = summary.description, summary.records
    is_audio = any(record.seconds for record in records)
    noun, count = "clips" if is_audio else "images", content["samples"]
    # no rate if others, or earlier runs, have done some of the work
    rate = "" if summary.num_reused else f" ({count / summary.seconds:.0f} {noun}/s)"
    num_bytes = sum(size for record in records for _, size, _ in record.files)
    rows = [(noun, f"{count}")]
    if not is_audio:
        rows += [
            ("  bytes kept", f"{content['kept']}"),
            *([("  markers added", f"{content['marked']}")] if content["marked"] else []),
            ("  encoded anew", f"{content['encoded']}"),
        ]
    rows += [
        *(_deep_rows(content["deep"]) if "deep" in content else []),
        ("unreadable", f"{len(content['skipped'])}"),
        *([("ignored", f"{content['ignored']}")] if content["ignored"] else []),
        ("bytes", f"{num_bytes} ({num_bytes / 1e6:.1f} MB)"),
        ("time", f"{summary.seconds:.1f} s{rate}"),
    ]
    print(f"wrote {printable(destination)}")
    for name, value in rows:
        print(f"  {name:<16}{printable(value)}")
    print_table(of_records(records, content["classes"]))
    for item in content["skipped"][:_NUM_SHOWN]:
        print(f"  unreadable: {printable(item['path'])}: {printable(item['reason'])}")
    if len(content["skipped"]) > _NUM_SHOWN:
        print(f"  … and {len(content['skipped']) - _NUM_SHOWN} more, listed in the description")
    for line in content.get("left_out", ()):
        print(f"  warning: {printable(line)}")
    for name in content.get("ignored_examples", ()):
        print(f"  ignored, for instance: {printable(name)}")


def _deep_rows(deep: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary rows: which values of deep images became 0 to 255."""
    ranges = [(text, spread["guessed"], _count(spread["samples"]))
              for text, spread in deep["ranges"].items()]  # fmt: skip
    total = sum(number for _, _, number in ranges)
    rows = [("deep", f"{total} of more than 8 bits; these values became 0..255:")]
    for text, guessed, number in sorted(ranges, key=lambda spread: -spread[2]):
        rows.append((f"  {text}", f"{number}, guessed" if guessed else f"{number}"))
    if any(guessed for _, guessed, _ in ranges):
        rows.append(
            ("  guessed", "from each image's largest value; --deep-range LOW,HIGH sets one for all")
        )
    num_flat = _count(deep["nearly_one_grey"])
    if num_flat:
        rows.append(("  one grey", f"{num_flat} of them are nearly; the description lists them"))
    return rows


def _count(spans: list[list[int]]) -> int:
    return sum(last - first + 1 for first, last in spans)


def _parser() -> argparse.ArgumentParser:
    kinds = "".join(f"  {name:<16}{text}\n" for name, text in KINDS.items())
    parser = command_parser("data_prep.convert", __doc__, _EPILOG + kinds)
    _add_result_options(parser.add_argument)
    add = parser.add_argument
    add("--workers", type=int, default=available_cores(), help="processes (all cores)")
    add("--scheduler", metavar="ADDRESS", help="use the workers of this Dask cluster instead")
    add("--part", metavar="K/N", help="write only the K-th of N parts, from 1")
    add("--merge", metavar="DST", help="make one data set of the parts of DST")
    add("--overwrite", action="store_true", help="replace DST when the new one is complete")
    add("--strict", action="store_true", help="stop at the first file that cannot be read")
    add("--verify", action="store_true", help="afterwards, check checksums and decode every sample")
    return parser


def _add_result_options(add: Callable[..., Any]) -> None:
    """Add the options that decide the bytes of the result."""
    add("source", metavar="SRC", action=LocalPath, nargs="?", help="folder or archive")
    add("destination", metavar="DST", nargs="?", help="file.beton, folder or s3:// for MDS shards")
    add("--format", choices=("mds", "ffcv"), help="what to write")
    add("--source", dest="kind", default="auto", metavar="KIND", help="kind of SRC (detected)")
    add("--max-side", type=int, help="shrink larger images to this longer side in pixels")
    add("--quality", type=int, default=90, help="JPEG quality of images encoded again (90)")
    add(
        "--channels",
        type=int,
        default=3,
        metavar="N",
        help="channels of the stored images: 3 RGB, 1 grey, others as lossless .npy (3)",
    )
    add(
        "--deep-range",
        default="auto",
        metavar="auto|LOW,HIGH",
        help="values of 16-bit and float images that become 0 and 255 (auto: a guess for each)",
    )
    add(
        "--frames",
        type=int,
        choices=(98, 100),
        help="frames per clip; 100 adds 20 ms (100)",
    )
    add("--split", choices=("train", "val", "test"), help="write only this split")
    add("--val-fraction", type=float, default=0.1, help="share of val if it is drawn (0.1)")
    add("--seed", type=int, default=0, help="seed of the split and of --keywords (0)")
    add(
        "--keywords",
        metavar="WORD,WORD",
        help="classes of clips: these words, unknown and silence; 12: Google's usual classes",
    )
    add(
        "--check",
        choices=("full", "header"),
        default="full",
        help="check kept JPEGs by decoding them, or only their beginning and end (full)",
    )
    add(
        "--seekable",
        action="store_true",
        help="add restart markers to JPEGs: same pixels, other bytes; crops decode faster",
    )
    add("--shard-mb", type=float, help="megabytes of SRC in a shard (67, less for small SRC)")


def _settings(args: argparse.Namespace) -> Settings:
    """Return the settings given on the command line, or refuse one that is out of range."""
    for name, value in (("SRC", args.source), ("DST", args.destination), ("--format", args.format)):
        if value is None:
            raise UserError(f"{name} is missing; --help shows examples.")
    checks = (
        ("--max-side", args.max_side, args.max_side is None or args.max_side >= 1, "at least 1"),
        ("--quality", args.quality, 1 <= args.quality <= 100, "1 to 100"),
        ("--val-fraction", args.val_fraction, 0 < args.val_fraction < 1, "between 0 and 1"),
        ("--channels", args.channels, args.channels >= 1, "at least 1"),
        ("--shard-mb", args.shard_mb, args.shard_mb is None or args.shard_mb > 0, "above 0"),
    )
    for name, value, is_good, wanted in checks:
        if not is_good:
            raise UserError(f"{name} {value} is out of range; it must be {wanted}.")
    keywords = None
    if args.keywords is not None:
        from data_prep.sources.keywords import parse_keywords

        keywords = parse_keywords(args.keywords)
    values = {**vars(args), "source": args.kind, "keywords": keywords}
    deep = parse_range(args.deep_range, "--deep-range")  # equal ranges are the same conversion
    values["deep_range"] = "auto" if deep is None else f"{deep.low:.15g},{deep.high:.15g}"
    if args.split is None:  # then they have no effect
        values["val_fraction"] = Settings.val_fraction
        values["seed"] = args.seed if keywords else Settings.seed
    return Settings(**{field.name: values[field.name] for field in fields(Settings)})


def _convert(args: argparse.Namespace) -> Summary | None:
    settings = _settings(args)
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} is out of range; it must be at least 1.")
    if args.part and (args.overwrite or args.verify):
        raise UserError("--part excludes --overwrite and --verify; verify when you --merge.")
    check_exists("SRC", str(args.source), "give the folder or archive of a data set")
    from data_prep.distribute.conversion import convert
    from data_prep.plan.plan import parse_share

    return convert(
        args.source,
        args.destination,
        settings,
        num_workers=args.workers,
        strict=args.strict,
        overwrite=args.overwrite,
        share=parse_share(args.part) if args.part else None,
        scheduler=args.scheduler,
    )


def _merge(args: argparse.Namespace) -> Summary | None:
    if vars(args) != vars(_parser().parse_args(["--merge", args.merge])) | {"verify": args.verify}:
        raise UserError(
            "--merge DST takes only --verify: the parts have their own source and settings."
        )
    from data_prep.distribute.conversion import merge

    return merge(args.merge)


def _finish(destination: str, summary: Summary | None, args: argparse.Namespace) -> None:
    """Print the summary, and verify if requested."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may not be valid text
        sys.stdout.reconfigure(errors="backslashreplace")
    if summary is None:
        print(f"{printable(destination)} already holds this conversion; nothing to do.")
    else:
        name = f"part {args.part} of {destination}" if args.part else destination
        _print_summary(name, summary)
    if args.verify:
        from data_prep.verify import verify as verify_data

        verify_data(destination)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    if args.merge is None:
        _finish(args.destination, _convert(args), args)
        return 0
    _finish(args.merge, _merge(args), args)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
