"""From a source of images or WAV files to a complete data set in its place, or to nothing."""

import importlib
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data_prep import sidecar
from data_prep.images import PreparedImage, Unreadable, prepare_image
from data_prep.parallel import ordered_map
from data_prep.reading import read_item
from data_prep.sources.registry import open_source
from data_prep.sources.source import Item, Source
from data_prep.staging import replace_folder, replace_pair, staging_folder
from data_prep.tally import Settings, Tally
from pospre.data.mds_reader import SIDECAR_NAME, is_mds
from pospre.data.sidecar import VERSION
from pospre.errors import UserError

if TYPE_CHECKING:
    from data_prep.audio import PreparedClip

_FRAMES = 100  # of a clip: one second, and 20 ms of silence

_MISSING_LIBRARY = {
    "ffcv": "FFCV cannot be loaded ({error}); install its libraries (Debian, Ubuntu: apt-get "
    "install pkg-config libopencv-dev libturbojpeg0-dev, then pip install ffcv), or use "
    "--format mds.",
    "mds": "Streaming cannot be loaded ({error}); pip install mosaicml-streaming, or use "
    "--format ffcv.",
}


def convert(
    source: Path,
    destination: Path,
    settings: Settings,
    *,
    num_workers: int,
    strict: bool = False,
    overwrite: bool = False,
) -> Tally | None:
    """Convert a data set; return None when the destination already holds this very conversion.

    Raises:
        UserError: nothing to convert, the destination is taken or cannot be written, a library is
            missing, or with ``strict`` a file cannot be read. The destination is then untouched.
    """
    _check_paths(source, destination, settings.format)
    listed, settings = _select(source, settings)
    made_from = {"settings": asdict(settings), "source": listed.fingerprint()}
    if not overwrite and _is_complete(destination, settings.format, made_from):
        return None
    if overwrite:
        _check_replaceable(destination)
    writer_module = _load_writer(settings.format)
    start = time.monotonic()
    with staging_folder(destination) as partial_folder:
        tally = _write_samples(
            partial_folder, listed, settings, writer_module, num_workers=num_workers, strict=strict
        )
        tally.split_rule = listed.split_rule
        _describe_and_publish(partial_folder, destination, listed, settings, tally, made_from)
    tally.seconds = time.monotonic() - start
    return tally


def _select(path: Path, settings: Settings) -> tuple[Source, Settings]:
    """List the source's wanted part; settings are those that matter for its kind."""
    source = open_source(
        path,
        split=settings.split,
        val_fraction=settings.val_fraction,
        seed=settings.seed,
    )
    if not source.is_audio:
        if settings.frames is not None:
            raise UserError(
                f"--frames {settings.frames} is for clips, but {path} is no folder of WAV files."
            )
        return source, settings
    if settings.format != "mds":
        raise UserError(f"{path} holds WAV files; their features are stored with --format mds.")
    return source, replace(settings, frames=settings.frames or _FRAMES)


def _check_paths(source: Path, destination: Path, data_format: str) -> None:
    for path in (source, destination):
        if re.match(r"\w\w+:/", str(path)):  # s3:/… (Path drops the second slash)
            raise UserError(f"{path} is remote; convert locally and copy the result afterwards.")
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
    if not is_mds(destination):
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


def _prepare_item(
    item: Item, settings: Settings, source: Source
) -> "PreparedImage | PreparedClip | Unreadable":
    data = read_item(source, item)
    if isinstance(data, Unreadable):
        return data
    if settings.frames is None:
        return prepare_image(data, settings.max_side, settings.quality)
    from data_prep.audio import prepare_clip  # torchaudio: seconds to import

    return prepare_clip(data, settings.frames)


def _write_samples(
    partial_folder: Path,
    source: Source,
    settings: Settings,
    writer_module: Any,
    *,
    num_workers: int,
    strict: bool,
) -> Tally:
    """Prepare every file in worker processes and write the good ones in order.

    Raises:
        UserError: no file can be read, or with ``strict`` one cannot.
    """
    tally = Tally()
    noun, unit, make_writer = "images", "img", writer_module.Writer
    if source.is_audio:
        from data_prep.audio import Statistics

        tally.statistics = Statistics()
        noun, unit = "WAV files", "clip"
        make_writer = partial(writer_module.FeatureWriter, num_frames=settings.frames)
    prepare = partial(_prepare_item, settings=settings, source=replace(source, items=()))
    results = ordered_map(prepare, source.items, min(num_workers, len(source.items)))
    bar = tqdm(results, total=len(source.items), unit=unit, desc="convert", disable=None)
    writing = _writing(make_writer(partial_folder, source.items))
    with closing(results), closing(bar), writing as writer:
        for item, prepared in zip(source.items, bar, strict=True):
            result = _storable(prepared, writer.max_bytes)
            if not isinstance(result, Unreadable):
                writer.write(item, result)
                tally.add(result)
            elif strict:
                raise UserError(
                    f"{source.root / item.name} cannot be read: {result.reason}. Mend or remove "
                    "it; without --strict such files are listed and left out."
                )
            else:
                tally.skipped.append({"path": item.name, "reason": result.reason})
        if not tally.num_samples:
            first = tally.skipped[0]
            raise UserError(
                f"{source.root}: none of the {len(source.items)} {noun} can be read "
                f"({first['path']}: {first['reason']}); nothing was written."
            )
    return tally


def _storable(
    result: "PreparedImage | PreparedClip | Unreadable", max_bytes: int
) -> "PreparedImage | PreparedClip | Unreadable":
    if isinstance(result, Unreadable) or result.num_bytes <= max_bytes:
        return result
    return Unreadable(
        f"as a JPEG it takes {result.num_bytes} bytes, but at most {max_bytes} fit; --max-side "
        "makes it smaller"
    )


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
    source: Source,
    settings: Settings,
    tally: Tally,
    made_from: dict[str, Any],
) -> None:
    """Write the description, then move everything to its place."""
    is_mds = settings.format == "mds"
    data = partial_folder if is_mds else partial_folder / sidecar.BETON_NAME
    description = partial_folder / SIDECAR_NAME
    content = {
        "format": f"pospre-{settings.format}",
        "version": VERSION,
        "samples": tally.num_samples,
        "classes": source.classes,
        "kept": tally.num_kept,
        "encoded": tally.num_encoded,
        "ignored": source.num_ignored,
        "skipped": tally.skipped,
        "made_from": made_from,
        **sidecar.checksums(data, settings.format),
    }
    if tally.statistics is not None:
        content["features"] = tally.statistics.describe()
    if tally.split_rule is not None:
        content["split_rule"] = tally.split_rule
    sidecar.write_sidecar(description, content)
    if is_mds:
        replace_folder(partial_folder, destination)
        return
    # The description first: without the file beside it, it means nothing to a reader.
    beside = sidecar.sidecar_path(destination, settings.format)
    replace_pair((description, beside), (data, destination))
