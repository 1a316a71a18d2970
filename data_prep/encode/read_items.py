"""Reading an item of a source: its bytes, or a ``DamagedItem`` with the reason."""

import errno

from data_prep.files.archives import DamagedItem
from data_prep.sources.source import Item, Source
from pospre.errors import UserError

# errors of one file, not of its neighbours: broken links, forbidden, a long path
_ONE_FILES_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)


def read_item(source: Source, item: Item) -> bytes:
    """Return the encoded image or clip of an item; ``DamagedItem`` if it has no usable content.

    ``UserError`` if the disk or the network fails, or a listed file has vanished; leaving such
    items out would lose good ones.
    """
    try:
        data = source.read(item)
    except OSError as error:
        if error.errno == errno.ENOENT and item.stamp:
            raise UserError(
                f"{source.root / item.name} existed when {source.root} was listed, but is gone: "
                f"{error.strerror}. Check the disk or the network share, then run the same command "
                "again."
            ) from error
        if error.errno in _ONE_FILES_ERRORS:
            raise DamagedItem(error.strerror or str(error)) from error
        raise UserError(
            f"{source.root / item.name} cannot be read: {error.strerror or error}. The file is not "
            "the cause: check the disk or the network share, then run the same command again. "
            "Nothing was written."
        ) from error
    except MemoryError as error:
        raise DamagedItem("the file is larger than the memory") from error
    if not data:
        raise DamagedItem("the file is empty")
    return data
