"""Open a data set, whatever its storage format."""

from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path

from pospre.data.decode.bit_depth import Decoding, DeepRange, parse_range
from pospre.data.stores.description import Noted
from pospre.data.stores.ffcv import FfcvReader
from pospre.data.stores.files import odd_file
from pospre.data.stores.folder import FolderReader
from pospre.data.stores.mds import MdsReader, is_mds
from pospre.data.stores.mds_index import INDEX_NAME
from pospre.data.stores.reader import Reader
from pospre.errors import UserError, needing, suggestion


def open_reader(
    path: str | Path,
    *,
    cache_dir: str | Path | None = None,
    cache_limit: int | None = None,
    channels: int | None = None,
    deep_range: DeepRange | None = None,
) -> Reader:
    """Open an image folder, a ``.beton`` file or MDS shards; the kind is found out.

    Sizes and structure are checked; contents (checksums) only of what is downloaded.

    Args:
        path: image folder, ``.beton`` file, directory of MDS shards, or ``s3://bucket/folder`` of
            MDS shards.
        cache_dir: folder for downloaded shards, by default ``$POSPRE_CACHE`` or
            ``~/.cache/pospre``; every remote data set has a folder of its own in there.
        cache_limit: bytes that the shards of a remote data set may take; None: no limit.
        channels: that images are decoded to: 3 (RGB), 1 (grey), or the number of bands that every
            one has; None: what the data set notes, else 3.
        deep_range: values that become 0 and 255 in images of more than 8 bits; None: see
            ``pospre.data.decode.bit_depth``.

    Raises:
        UserError: missing, empty, unfinished, damaged, of an unknown format, or of other channels.
    """
    reader = _open(path, cache_dir, cache_limit)
    noted = reader.noted or Noted()
    if reader.noted is not None and reader.features is None:
        _check_noted(reader, noted, channels, deep_range)
    reader.decoding = Decoding(noted.channels if channels is None else channels, deep_range)
    return reader


def check_options(given: Iterable[str], caller: Callable[..., object]) -> None:
    """Raise ``UserError`` for options that ``caller`` hands on to ``open_reader``, if unknown."""
    options = signature(open_reader).parameters
    for key in given:
        if key not in options:
            own = [name for name in signature(caller).parameters if name != "storage"]
            hint = suggestion(key, [*own, *options])
            raise UserError(f"{caller.__name__} has no option '{key}'.{hint}")


def _check_noted(
    reader: Reader, noted: Noted, channels: int | None, deep_range: DeepRange | None
) -> None:
    """Refuse what the images of a converted data set cannot be made to."""
    made_of_each_other = {channels, noted.channels} <= {1, 3}
    if channels not in (None, noted.channels) and not made_of_each_other:
        raise UserError(
            f"encoder.channels = {channels}, but {reader.address} was converted with "
            f"--channels {noted.channels}; set encoder.channels: {noted.channels}, or convert "
            f"again with --channels {channels}."
        )
    if deep_range is not None:
        before = parse_range(noted.deep_range or "auto", "deep_range")
        if before != deep_range:
            raise UserError(
                f"data.deep_range = {deep_range}, but {reader.address} was converted with "
                f"--deep-range {noted.deep_range}, and holds 8 bits; leave data.deep_range out, or "
                "convert again."
            )


def _open(path: str | Path, cache_dir: str | Path | None, cache_limit: int | None) -> Reader:
    if path == "":  # would be the current folder
        raise UserError("the path of a data set is empty; name a folder or file, or . for here.")
    if "://" in str(path):
        return _open_remote(str(path), cache_dir, cache_limit)
    path = Path(path)
    problem = ""
    if not path.exists():
        problem = "does not exist"
    elif odd := odd_file(path):
        problem = f"is {odd}"
    elif path.is_file() and path.suffix != ".beton":
        problem = "is a file, but no .beton"
    if problem:
        raise UserError(
            f"{path} {problem}; give an image folder, a .beton file or an MDS directory."
        )
    if path.is_file():
        return FfcvReader(path)
    if not is_mds(path):
        return FolderReader(path)
    if not (path / INDEX_NAME).exists():
        raise UserError(
            f"{path} holds MDS shards but no {INDEX_NAME}: its conversion was never finished. "
            f"Convert again with `python -m data_prep.convert SRC {path} --format mds`."
        )
    return MdsReader(path)


def _open_remote(path: str, cache_dir: str | Path | None, cache_limit: int | None) -> Reader:
    if not path.startswith("s3://"):
        raise UserError(
            f"{path}: data sets are read from local disks and from s3://; copy it first."
        )
    if path.endswith(".beton"):
        name = path.rpartition("/")[2]
        raise UserError(
            f"{path} is remote, and .beton files are read from local disks: copy it first, "
            f"`aws s3 cp {path} {name}`, or convert to MDS shards, which are fetched one by one."
        )
    with needing("s3", path):
        from pospre.data.bucket.reader import RemoteMdsReader

    return RemoteMdsReader(path, cache_dir=cache_dir, cache_limit=cache_limit)
