"""Convert a folder of images into one data set file (.beton) or a folder of MDS shards."""

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep import sidecar
from data_prep.images import PreparedImage, Unreadable, prepare_image
from data_prep.parallel import default_workers, ordered_map
from data_prep.sources.image_folder import ImageFile, ImageFolder, list_images, select_split
from data_prep.staging import replace_files, replace_folder, staging_folder
from pospre.errors import UserError, run_command

_EPILOG = """\
examples:
  python -m data_prep.convert photos photos.beton --format ffcv
  python -m data_prep.convert photos photos_mds --format mds --max-side 512 --verify
  python -m data_prep.convert photos train.beton --format ffcv --split train --val-fraction 0.1
  python -m data_prep.convert photos val.beton   --format ffcv --split val   --val-fraction 0.1

Sub-folders directly below SRC are the classes; images directly in SRC mean no classes. JPEGs that
need no change keep their bytes. Files that cannot be read are listed, counted and left out. DST
appears only when it is complete: a conversion that was killed is simply run again.
"""

_MISSING_LIBRARY = {
    "ffcv": "FFCV cannot be loaded ({error}); install its libraries (Debian, Ubuntu: apt-get "
    "install pkg-config libopencv-dev libturbojpeg0-dev, then pip install ffcv), or use "
    "--format mds.",
    "mds": "Streaming cannot be loaded ({error}); pip install mosaicml-streaming, or use "
    "--format ffcv.",
}

_NUM_SHOWN = 20


@dataclass(frozen=True)
class Settings:
    """Everything beside the source that decides the bytes of the result."""

    format: str
    max_side: int | None = None
    quality: int = 90
    split: str | None = None
    val_fraction: float = 0.1
    seed: int = 0


@dataclass
class Tally:
    """What a conversion met."""

    num_kept: int = 0
    num_encoded: int = 0
    width_sum: int = 0
    height_sum: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def num_images(self) -> int:
        """Images written."""
        return self.num_kept + self.num_encoded

    def add(self, image: PreparedImage) -> None:
        """Count a written image."""
        self.num_kept += image.kept
        self.num_encoded += not image.kept
        self.width_sum += image.width
        self.height_sum += image.height


def convert(
    source: Path,
    destination: Path,
    settings: Settings,
    *,
    num_workers: int,
    strict: bool = False,
    overwrite: bool = False,
) -> bool:
    """Convert a folder; return False when the destination already holds this very conversion.

    Raises:
        UserError: nothing to convert, the destination is taken or cannot be written, a library is
            missing, or with ``strict`` a file cannot be read. The destination is then untouched.
    """
    _check_paths(source, destination, settings.format)
    folder = list_images(source)
    if settings.split is not None:
        folder = select_split(folder, settings.split, settings.val_fraction, settings.seed)
    made_from = {"settings": asdict(settings), "source": folder.fingerprint()}
    if not overwrite and _is_complete(destination, settings.format, made_from):
        print(f"{destination} already holds this conversion; nothing to do.")
        return False
    if overwrite:
        _check_replaceable(destination)
    writer_module = _load_writer(settings.format)
    start = time.monotonic()
    with staging_folder(destination) as partial_folder:
        tally = _write_images(
            partial_folder, folder, settings, writer_module, num_workers=num_workers, strict=strict
        )
        _describe_and_publish(partial_folder, destination, folder, settings, tally, made_from)
    _print_summary(destination, folder, tally, time.monotonic() - start)
    return True


def _check_paths(source: Path, destination: Path, data_format: str) -> None:
    if "://" in str(source) or ":/" in str(destination):
        raise UserError(f"{source} and {destination} must be local; copy the result afterwards.")
    is_beton = destination.suffix == ".beton"
    if is_beton != (data_format == "ffcv"):
        remedy = "end in .beton" if data_format == "ffcv" else "be a folder, not a .beton"
        raise UserError(f"DST {destination} must {remedy} for --format {data_format}.")
    inside, target = source.resolve(), destination.resolve()
    if target == inside or inside in target.parents or target in inside.parents:
        raise UserError(f"DST {destination} and SRC {source} must lie apart.")
    if destination.exists() and destination.is_dir() == is_beton:
        kind = "folder" if is_beton else "file"
        raise UserError(f"DST {destination} is a {kind}; choose another name.")


def _is_complete(destination: Path, data_format: str, made_from: dict[str, Any]) -> bool:
    """Tell whether the destination holds this conversion; False also when nothing is there.

    Raises:
        UserError: something else is there.
    """
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    taken = f"{destination} exists"
    remedy = "choose another DST, or replace it with --overwrite."
    if not sidecar.sidecar_path(destination, data_format).exists():
        raise UserError(f"{taken} and was not made by this command; {remedy}")
    content = sidecar.read_sidecar(destination)
    before = content["made_from"]
    for key, value in made_from["settings"].items():
        if before["settings"].get(key) != value:
            old = before["settings"].get(key)
            raise UserError(f"{taken}, made with {key}={old} instead of {value}; {remedy}")
    if before["source"] != made_from["source"]:
        raise UserError(f"{taken}, made from other images or older versions of them; {remedy}")
    sidecar.check_sizes(destination, content)
    return True


def _check_replaceable(destination: Path) -> None:
    """Refuse to remove a folder that is no data set: the name may be a slip."""
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not any((destination / name).exists() for name in (sidecar.MDS_NAME, "index.json")):
        raise UserError(
            f"{destination} is a folder that holds something else than a data set; --overwrite "
            "would remove it. Choose another DST."
        )


def _load_writer(data_format: str) -> Any:
    """Import the writer of a format: the libraries are heavy, and FFCV's may be missing."""
    try:
        return importlib.import_module(f"data_prep.writers.{data_format}")
    except ImportError as error:
        raise UserError(_MISSING_LIBRARY[data_format].format(error=error)) from error


def _prepare_file(file: ImageFile, settings: Settings, root: Path) -> PreparedImage | Unreadable:
    return prepare_image(root / file.path, settings.max_side, settings.quality)


def _write_images(
    partial_folder: Path,
    folder: ImageFolder,
    settings: Settings,
    writer_module: Any,
    *,
    num_workers: int,
    strict: bool,
) -> Tally:
    """Prepare every image in worker processes and write the good ones in order.

    Raises:
        UserError: no image can be read, or with ``strict`` one cannot.
    """
    tally = Tally()
    prepare = partial(_prepare_file, settings=settings, root=folder.root)
    results = ordered_map(prepare, folder.files, min(num_workers, len(folder.files)))
    bar = tqdm(results, total=len(folder.files), unit="img", desc="convert", disable=None)
    writing = _writing(writer_module.Writer(partial_folder, folder.files))
    with closing(results), closing(bar), writing as writer:
        for file, result in zip(folder.files, bar, strict=True):
            if isinstance(result, PreparedImage):
                writer.write(file, result)
                tally.add(result)
            elif strict:
                raise UserError(
                    f"{folder.root / file.path} cannot be read: {result.reason}. Mend or remove "
                    "it; without --strict such files are listed and left out."
                )
            else:
                tally.skipped.append({"path": file.path, "reason": result.reason})
        if not tally.num_images:
            first = tally.skipped[0]
            raise UserError(
                f"{folder.root}: none of the {len(folder.files)} images can be read "
                f"({first['path']}: {first['reason']}); nothing was written."
            )
    return tally


@contextmanager
def _writing(writer: Any) -> Iterator[Any]:
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def _describe_and_publish(
    partial_folder: Path,
    destination: Path,
    folder: ImageFolder,
    settings: Settings,
    tally: Tally,
    made_from: dict[str, Any],
) -> None:
    """Write the description, then move everything to its place."""
    is_mds = settings.format == "mds"
    data = partial_folder if is_mds else partial_folder / "data.beton"
    description = partial_folder / sidecar.MDS_NAME
    content = {
        "format": f"pospre-{settings.format}",
        "version": sidecar.VERSION,
        "samples": tally.num_images,
        "classes": None if folder.classes is None else list(folder.classes),
        "kept": tally.num_kept,
        "encoded": tally.num_encoded,
        "ignored": folder.num_ignored,
        "skipped": tally.skipped,
        "made_from": made_from,
        **sidecar.checksums(data, settings.format),
    }
    sidecar.write_sidecar(description, content)
    if is_mds:
        replace_folder(partial_folder, destination)
        return
    # The description first: while the two disagree, a reader refuses the data set.
    beside = sidecar.sidecar_path(destination, settings.format)
    replace_files([(description, beside), (data, destination)])


def _print_summary(destination: Path, folder: ImageFolder, tally: Tally, seconds: float) -> None:
    content = sidecar.read_sidecar(destination)
    num_bytes = sum(size for _, size, _ in sidecar.data_files(destination, content))
    num_images = tally.num_images
    width, height = tally.width_sum / num_images, tally.height_sum / num_images
    rows = [
        ("images", f"{num_images}"),
        ("  bytes kept", f"{tally.num_kept}"),
        ("  encoded anew", f"{tally.num_encoded}"),
        ("unreadable", f"{len(tally.skipped)}"),
        ("not images", f"{folder.num_ignored}"),
        ("classes", "none" if folder.classes is None else f"{len(folder.classes)}"),
        ("mean size", f"{width:.0f} x {height:.0f}"),
        ("bytes", f"{num_bytes} ({num_bytes / 1e6:.1f} MB)"),
        ("time", f"{seconds:.1f} s ({num_images / seconds:.0f} images/s)"),
    ]
    print(f"wrote {destination}")
    for name, value in rows:
        print(f"  {name:<16}{value}")
    for item in tally.skipped[:_NUM_SHOWN]:
        print(f"  unreadable: {item['path']}: {item['reason']}")
    if len(tally.skipped) > _NUM_SHOWN:
        print(f"  … and {len(tally.skipped) - _NUM_SHOWN} more, all named in the description")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.convert",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SRC", type=Path, help="folder of images")
    add("destination", metavar="DST", type=Path, help="file.beton, or folder for MDS shards")
    add("--format", choices=("mds", "ffcv"), required=True, help="what to write")
    add("--max-side", type=int, help="shrink larger images to this longer side in pixels")
    add("--quality", type=int, default=90, help="JPEG quality of what is encoded anew (90)")
    add("--workers", type=int, default=default_workers(), help="processes (all cores)")
    add("--split", choices=("train", "val"), help="write only this part")
    add("--val-fraction", type=float, default=0.1, help="share of the val part (0.1)")
    add("--seed", type=int, default=0, help="seed of the split (0)")
    add("--strict", action="store_true", help="stop at the first file that cannot be read")
    add("--overwrite", action="store_true", help="replace an existing DST")
    add("--verify", action="store_true", help="then check every checksum and decode every image")
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
    )
    convert(
        args.source,
        args.destination,
        settings,
        num_workers=args.workers,
        strict=args.strict,
        overwrite=args.overwrite,
    )
    if args.verify:
        from data_prep.verify import verify

        verify(args.destination)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
