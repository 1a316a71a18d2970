"""Images and masks in files, as the dense evaluations read them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy import ndarray
from PIL import Image

from pospre.errors import UserError


@contextmanager
def _opened(path: Path, what: str = "image") -> Iterator[Image.Image]:
    """Open an image file, and make a ``UserError`` of what cannot be read in it."""
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} is no {what} that can be read ({error}); replace it, or leave it out."
        ) from error


def read_image(path: Path) -> ndarray:
    """Return the pixels of an image file, uint8 RGB (H, W, 3).

    Raises:
        UserError: it cannot be read.
    """
    with _opened(path) as image:
        return np.asarray(image.convert("RGB"))


def image_sides(path: Path) -> tuple[int, int]:
    """Return height and width of an image file, of which only the head is read.

    Raises:
        UserError: it cannot be read.
    """
    with _opened(path) as image:
        return image.height, image.width


def read_mask(path: Path) -> ndarray:
    """Return the values of a mask file, int64 (H, W).

    Raises:
        UserError: it cannot be read, or has colours.
    """
    with _opened(path, "mask") as image:
        values = np.asarray(image)
    if values.ndim != 2:
        raise UserError(
            f"{path} has {values.shape[2]} channels; a mask is a grey or indexed PNG of class ids."
        )
    return values.astype(np.int64)


def check_not_smaller(path: Path, sides: Sequence[float], patch: int) -> None:
    """Raise a ``UserError`` for an image that is smaller than a patch."""
    if min(sides) < patch:
        raise UserError(
            f"{path} has {sides[0]:.0f}×{sides[1]:.0f} pixels as it is shown, less than a "
            f"patch of {patch}; give a greater size=…, or leave it out."
        )
