"""Open a data set, whatever its storage format."""

from pathlib import Path

from pospre.data.ffcv_reader import FfcvReader
from pospre.data.folder_reader import FolderReader
from pospre.data.mds_reader import INDEX_NAME, MdsReader, is_mds
from pospre.data.samples import Reader
from pospre.errors import UserError


def open_reader(path: str | Path) -> Reader:
    """Open an image folder, a ``.beton`` file or an MDS directory; the kind is found out.

    Sizes and structure are checked, contents (checksums) are not.

    Raises:
        UserError: missing, empty, unfinished, damaged or of an unknown format.
    """
    if "://" in str(path):
        raise UserError(
            f"{path} is remote; data sets are read from local disks so far: copy it first, for "
            f"instance with `aws s3 sync {path} data`."
        )
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path} does not exist; give an image folder, a .beton file or an MDS directory."
        )
    if path.is_file():
        if path.suffix != ".beton":
            raise UserError(
                f"{path} is a file, but no .beton; give an image folder, a .beton file or an MDS "
                "directory."
            )
        return FfcvReader(path)
    if not is_mds(path):
        return FolderReader(path)
    if not (path / INDEX_NAME).exists():
        raise UserError(
            f"{path} holds MDS shards but no {INDEX_NAME}: its conversion was never finished. "
            f"Convert again with `python -m data_prep.convert SRC {path} --format mds`."
        )
    return MdsReader(path)
