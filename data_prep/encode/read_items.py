"""Reading an item of a source: its bytes, or a ``DamagedItem`` with the reason.

For images that were turned upright, EXIF's orientation also applies to the annotations.
"""

import errno
import io
from collections.abc import Callable

from PIL import Image

from data_prep.encode.images import PreparedImage
from data_prep.files.archives import DamagedItem
from data_prep.sources.source import Item, Source, compact
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

# errors of one file, not of its neighbours: broken links, forbidden, a long path
_ONE_FILES_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FIRST_SIDEWAYS = 5


def read_item(source: Source, item: Item) -> bytes:
    """Return the encoded image or clip of an item; ``DamagedItem`` if it has no usable content.

    ``UserError`` if the disk or the network fails, or a listed file has vanished; leaving such
    items out would lose good ones.
    """
    data = _read(source.read, source, item)
    if not data:
        raise DamagedItem("the file is empty")
    return data


def read_annotation(source: Source, item: Item, image: PreparedImage | None = None) -> bytes:
    """Return an item's annotation, turned like the image; empty if it has none.

    A JSON object gets the orientation, and its coordinates are kept. Errors are as in
    ``read_item``.
    """

    def annotate(item: Item) -> bytes | None:
        about = source.annotate(item)
        if about is None or image is None or image.orientation == 1:
            return about
        if source.annotation == "json":
            return compact(parse_object(about) | {"orientation": image.orientation})
        return orient_mask(about, image)

    return _read(annotate, source, item)


def orient_mask(data: bytes, image: PreparedImage) -> bytes:
    """Return a PNG mask turned like its image, with the same values and palette.

    A mask that already has the upright image's shape was drawn on it, and is kept.
    """
    buffer = io.BytesIO()
    try:
        with Image.open(io.BytesIO(data)) as mask:
            is_wide = mask.width > mask.height
            if (
                image.orientation >= _FIRST_SIDEWAYS
                and mask.width != mask.height
                and is_wide == (image.width > image.height)
            ):
                return data
            mask.transpose(_TURNS[image.orientation]).save(buffer, "PNG")
    except Exception as error:  # Pillow raises nearly every kind on damaged bytes
        raise DamagedItem(f"its mask cannot be read: {error}") from error
    return buffer.getvalue()


def _read(function: Callable[[Item], bytes | None], source: Source, item: Item) -> bytes:
    try:
        return function(item) or b""
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
