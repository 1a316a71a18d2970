"""One item of a source → its bytes, or a ``DamagedItem`` that says why it has none.

Of images that were turned upright EXIF's orientation holds for the annotations as well.
"""

import errno
import io
from collections.abc import Callable

from PIL import Image

from data_prep.encode.images import PreparedImage
from data_prep.files.locations import DamagedItem
from data_prep.sources.source import Item, Source, compact
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

# What keeps one file from being read, not its neighbours: links astray, forbidden, a long path.
_ONE_FILES_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
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

    What it tells is turned as the image was: a JSON object tells how, and its coordinates stay.

    Raises:
        DamagedItem: what it tells cannot be used.
        UserError: the disk or the network fails.
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
    """Return a PNG mask turned as its image was: the same values and palette, elsewhere.

    A mask that already has the shape of the upright image was drawn on that, and stays.

    Raises:
        DamagedItem: it cannot be decoded.
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
