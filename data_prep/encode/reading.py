"""One item of a source → its bytes, or a ``DamagedItem`` that says why it has none."""

import errno
from collections.abc import Callable

from data_prep.encode.images import PreparedImage
from data_prep.encode.orientation import note_orientation, orient_mask
from data_prep.files.locations import DamagedItem
from data_prep.sources.source import Item, Source
from pospre.errors import UserError

# What keeps one file from being read, not its neighbours: links astray, or forbidden.
_ONE_FILES_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP)


def read_item(source: Source, item: Item) -> bytes:
    """Return the encoded image or clip of an item.

    Raises:
        DamagedItem: there is none that can be used.
        UserError: the disk or the network fails, or a file that was listed is gone; to leave such
            items out would lose good ones.
    """
    data = _read(source.read, source, item)
    if not data:
        raise DamagedItem("the file is empty")
    return data


def read_annotation(source: Source, item: Item, image: PreparedImage | None = None) -> bytes:
    """Return what the source tells about an item beside its label; empty where it tells nothing.

    What it tells is turned as the image was.

    Raises:
        DamagedItem: what it tells cannot be used.
        UserError: the disk or the network fails.
    """

    def annotate(item: Item) -> bytes | None:
        about = source.annotate(item)
        if about is None or image is None or image.orientation == 1:
            return about
        if source.annotation == "json":
            return note_orientation(about, image.orientation)
        return orient_mask(about, image)

    return _read(annotate, source, item)


def _read(function: Callable[[Item], bytes | None], source: Source, item: Item) -> bytes:
    try:
        return function(item) or b""
    except OSError as error:
        if error.errno == errno.ENOENT and item.stamp:
            raise UserError(
                f"{source.root / item.name} was there when {source.root} was listed, and is gone: "
                f"{error.strerror}. Check the disk or the network share, then run the same command "
                "again."
            ) from error
        if error.errno in _ONE_FILES_ERRORS:
            raise DamagedItem(error.strerror or str(error)) from error
        raise UserError(
            f"{source.root / item.name} cannot be read: {error.strerror or error}. This is no "
            "matter of the file: check the disk or the network share, then run the same command "
            "again. Nothing was written."
        ) from error
    except MemoryError as error:
        raise DamagedItem("the file is larger than the memory") from error
