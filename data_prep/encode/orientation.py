"""Annotations of images that were turned upright: EXIF's orientation holds for them as well."""

import io
import json

from PIL import Image

from data_prep.encode.images import PreparedImage
from data_prep.files.locations import DamagedItem
from data_prep.sources.source import compact

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


def note_orientation(data: bytes, orientation: int) -> bytes:
    """Return a JSON object that tells how its image was turned; its coordinates stay."""
    return compact(json.loads(data) | {"orientation": orientation})
