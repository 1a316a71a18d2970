"""Open a data set of any storage format."""

import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from pydantic import PositiveInt

from pospre.arguments import taking
from pospre.data.decode.bit_depth import Decoding, DeepRange, given_range, parse_range
from pospre.data.reading import Storage
from pospre.data.stores.description import Noted
from pospre.data.stores.ffcv import FfcvReader
from pospre.data.stores.files import odd_file
from pospre.data.stores.folder_reader import FolderReader
from pospre.data.stores.mds import MdsReader, is_mds
from pospre.data.stores.mds_index import INDEX_NAME
from pospre.data.stores.reader import Reader
from pospre.errors import UserError, needing
from pospre.object_store import is_remote

_CONVERTED = (".zip", ".tar", ".parquet")
_ARCHIVES = (*_CONVERTED, ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_PATTERN = re.compile(r"[*?\[]")


@dataclass
class Source(Storage):
    """A data set."""

    path: str | Path | Reader
    """Image folder, ``.beton`` file, directory of MDS shards, or ``s3://bucket/folder`` of MDS
    shards; or a reader.
    """
    _: KW_ONLY
    channels: PositiveInt | None = None
    """Channels of decoded images: 3 (RGB), 1 (grey), or the number of bands; None: as recorded in
    the data set, else 3.
    """


def opened(source: Source) -> Reader:
    """Open an image folder, a ``.beton`` file or MDS shards; the format is detected.

    Sizes and structure are checked. Contents (checksums) are only checked for downloads.

    Raises:
        UserError: missing, empty, unfinished, damaged, of an unknown format, or with other
            channels.
    """
    if isinstance(source.path, Reader):
        return source.path
    reader = _open(source.path, source.cache_dir, source.cache_limit)
    noted, deep_range = reader.noted or Noted(), given_range(source.deep_range)
    if reader.noted is not None and reader.features is None:
        _check_noted(reader, noted, source.channels, deep_range)
    channels = noted.channels if source.channels is None else source.channels
    reader.decoding = Decoding(channels, deep_range)
    return reader


@taking(Source)
def open_reader(source: Source) -> Reader:
    """Open a data set."""
    return opened(source)


def _check_noted(
    reader: Reader, noted: Noted, channels: int | None, deep_range: DeepRange | None
) -> None:
    """Refuse options that contradict how the data set was converted."""
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
                f"--deep-range {noted.deep_range} and has 8 bits; remove data.deep_range, or "
                "convert again."
            )


def _open(path: str | Path, cache_dir: str | Path | None, cache_limit: int | None) -> Reader:
    if path == "":  # it would mean the current folder
        raise UserError("the path of a data set is empty; give a folder or file, or . for here.")
    _refuse_archive(str(path))
    if is_remote(str(path)) or "://" in str(path):
        return _open_remote(str(path), cache_dir, cache_limit)
    path = Path(path)
    problem = ""
    if not path.exists() and _PATTERN.search(str(path)):
        folder = _PATTERN.split(str(path))[0].rpartition("/")[0]
        raise UserError(f"{path} is a pattern; give the folder of images itself: {folder or '.'}")
    if not path.exists():
        problem = "does not exist"
    elif odd := odd_file(path):
        problem = f"is {odd}"
    elif path.is_file() and path.suffix != ".beton":
        problem = "is a file, but not a .beton"
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
            f"{path} has MDS shards but no {INDEX_NAME}: its conversion was not finished. Convert "
            f"again with `python -m data_prep.convert SRC {path} --format mds`."
        )
    return MdsReader(path)


def _refuse_archive(path: str) -> None:
    """Raise ``UserError`` if a path has the ending of an archive, or of a table of images."""
    ending = next((end for end in _ARCHIVES if path.lower().endswith(end)), None)
    if ending is None or Path(path).is_dir():
        return
    is_elsewhere = "://" in path
    local = path.rpartition("/")[2] if is_elsewhere else path
    remedy = "unpack it (tar -xf) and give the folder"
    if ending in _CONVERTED:
        remedy = f"convert it with `python -m data_prep.convert {local} DST --format mds`"
        remedy += ", or unpack it and give the folder" * (ending != ".parquet")
    kind = "a table" if ending == ".parquet" else "an archive"
    fetched = "copy it to a local disk, then " if is_elsewhere else ""
    raise UserError(f"{path} is {kind}, from which images are not read; {fetched}{remedy}.")


def _open_remote(path: str, cache_dir: str | Path | None, cache_limit: int | None) -> Reader:
    if not is_remote(path):
        raise UserError(
            f"{path}: data sets are read from local disks and from s3://; copy it first."
        )
    if path.endswith(".beton"):
        name = path.rpartition("/")[2]
        raise UserError(
            f"{path} is remote, but .beton files are read from local disks: copy it first, `aws s3 "
            f"cp {path} {name}`, or convert to MDS shards, which are fetched one by one."
        )
    with needing("s3", path):
        from pospre.data.bucket.reader import RemoteMdsReader

    return RemoteMdsReader(path, cache_dir=cache_dir, cache_limit=cache_limit)
