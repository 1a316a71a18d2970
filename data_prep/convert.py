"""Convert a folder of images or WAV files into one file (.beton) or a folder of MDS shards."""

import argparse
import sys
from pathlib import Path

from data_prep import sidecar
from data_prep.conversion import convert
from data_prep.tally import Settings, Tally
from pospre.data.cores import available_cores
from pospre.errors import UserError, run_command

_EPILOG = """\
examples:
  python -m data_prep.convert photos photos.beton --format ffcv
  python -m data_prep.convert photos photos_mds --format mds --max-side 512 --verify
  python -m data_prep.convert photos train.beton --format ffcv --split train --val-fraction 0.1
  python -m data_prep.convert photos val.beton   --format ffcv --split val   --val-fraction 0.1
  python -m data_prep.convert words  words_train --format mds  --split train

Sub-folders directly below SRC are the classes; images directly in SRC mean no classes. JPEGs that
need no change keep their bytes. Files that cannot be read are listed, counted and left out. DST
appears only when it is complete: a conversion that was killed is simply run again.

Of WAV files the MFCCs are stored, 40 every 10 ms of the first second. What Speech Commands and Free
Spoken Digits hold out themselves is their val; elsewhere it is drawn.
"""

_NUM_SHOWN = 20


def _print_summary(destination: Path, tally: Tally) -> None:
    content = sidecar.read_sidecar(destination)
    num_bytes = sum(size for _, size, _ in sidecar.data_files(destination, content))
    is_audio = tally.statistics is not None
    noun = "clips" if is_audio else "images"
    classes, rate = content["classes"], tally.num_samples / tally.seconds
    rows = [
        (noun, f"{tally.num_samples}"),
        *(_audio_rows(tally) if is_audio else _image_rows(tally)),
        ("unreadable", f"{len(tally.skipped)}"),
        (f"not {'WAV' if is_audio else 'images'}", f"{content['ignored']}"),
        ("classes", "none" if classes is None else f"{len(classes)}"),
        ("bytes", f"{num_bytes} ({num_bytes / 1e6:.1f} MB)"),
        ("time", f"{tally.seconds:.1f} s ({rate:.0f} {noun}/s)"),
    ]
    print(f"wrote {destination}")
    for name, value in rows:
        print(f"  {name:<16}{value}")
    for item in tally.skipped[:_NUM_SHOWN]:
        print(f"  unreadable: {item['path']}: {item['reason']}")
    if len(tally.skipped) > _NUM_SHOWN:
        print(f"  … and {len(tally.skipped) - _NUM_SHOWN} more, all named in the description")


def _image_rows(tally: Tally) -> list[tuple[str, str]]:
    width, height = tally.width_sum / tally.num_samples, tally.height_sum / tally.num_samples
    return [
        ("  bytes kept", f"{tally.num_kept}"),
        ("  encoded anew", f"{tally.num_encoded}"),
        ("mean size", f"{width:.0f} x {height:.0f}"),
    ]


def _audio_rows(tally: Tally) -> list[tuple[str, str]]:
    rows = [("mean length", f"{tally.audio_seconds / tally.num_samples:.2f} s")]
    return rows if tally.split_rule is None else [*rows, ("parted by", tally.split_rule)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.convert",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SRC", type=Path, help="folder of images or WAV files")
    add("destination", metavar="DST", type=Path, help="file.beton, or folder for MDS shards")
    add("--format", choices=("mds", "ffcv"), required=True, help="what to write")
    add("--max-side", type=int, help="shrink larger images to this longer side in pixels")
    add("--quality", type=int, default=90, help="JPEG quality of what is encoded anew (90)")
    add("--frames", type=int, choices=(98, 100), help="of a clip: 98, or 100 with 20 ms of silence")
    add("--workers", type=int, default=available_cores(), help="processes (all cores)")
    add("--split", choices=("train", "val"), help="write only this part")
    add("--val-fraction", type=float, default=0.1, help="share of the val part (0.1)")
    add("--seed", type=int, default=0, help="seed of the split (0)")
    add("--strict", action="store_true", help="stop at the first file that cannot be read")
    add("--overwrite", action="store_true", help="replace an existing DST")
    add("--verify", action="store_true", help="then check every checksum and decode every sample")
    return parser


def _check_numbers(args: argparse.Namespace) -> None:
    checks = (
        ("--max-side", args.max_side, args.max_side is None or args.max_side >= 1, "at least 1"),
        ("--quality", args.quality, 1 <= args.quality <= 100, "1 to 100"),
        ("--workers", args.workers, args.workers >= 1, "at least 1"),
        ("--val-fraction", args.val_fraction, 0 < args.val_fraction < 1, "between 0 and 1"),
    )
    for name, value, is_good, wanted in checks:
        if not is_good:
            raise UserError(f"{name} {value} is out of range; it must be {wanted}.")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    _check_numbers(args)
    has_split = args.split is not None
    settings = Settings(
        format=args.format,
        max_side=args.max_side,
        quality=args.quality,
        split=args.split,
        val_fraction=args.val_fraction if has_split else Settings.val_fraction,
        seed=args.seed if has_split else Settings.seed,
        frames=args.frames,
    )
    tally = convert(
        args.source,
        args.destination,
        settings,
        num_workers=args.workers,
        strict=args.strict,
        overwrite=args.overwrite,
    )
    if tally is None:
        print(f"{args.destination} already holds this conversion; nothing to do.")
    else:
        _print_summary(args.destination, tally)
    if args.verify:
        from data_prep.verify import verify

        verify(args.destination)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
