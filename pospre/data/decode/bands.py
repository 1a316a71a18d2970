"""Images as arrays: ``.npy`` files with any number of channels, and TIFFs with several bands."""

import io
from typing import Any

import numpy as np
from PIL import Image

NPY_START = b"\x93NUMPY"
TIFF_STARTS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
_ORIENTATION = "Orientation"


def read_npy(data: np.ndarray) -> np.ndarray:
    """Return the array of numbers in a ``.npy`` file, uint8 (N,); nothing is unpickled."""
    values = np.lib.format.read_array(io.BytesIO(data.data), allow_pickle=False)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"an array of {values.dtype}, not of numbers")
    return values


def npy_bytes(pixels: np.ndarray) -> bytes:
    """Return the ``.npy`` file of an array."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(pixels), allow_pickle=False)
    return stream.getvalue()


def read_tiff(data: bytes) -> tuple[np.ndarray, int]:
    """Return all bands of a TIFF's first image, and its orientation (1: upright).

    Raises:
        ValueError: it is too large, or tifffile is missing.
        Exception: of almost any kind, for damaged bytes.
    """
    try:
        import tifffile  # late: only needed here
    except ImportError as error:
        raise ValueError(
            "TIFFs of several bands need tifffile, which is missing: pip install tifffile"
        ) from error
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series: Any = file.series[0]
        limit = 2 * (Image.MAX_IMAGE_PIXELS or series.size)  # Pillow's limit for bombs
        if series.size > limit * 4:
            raise ValueError(f"{series.size} values are more than an image may have")
        tag = file.pages.first.tags.get(_ORIENTATION)
        return series.asarray(maxworkers=1), int(tag.value) if tag is not None else 1


def arrange(values: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
    """Return values (H, W), (H, W, C) or (C, H, W) as (H, W, C), where C is one of ``counts``."""
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim == 3 and values.size:
        if values.shape[2] in counts:
            return values
        if values.shape[0] in counts:
            return np.moveaxis(values, 0, 2)
    shape, wanted = " x ".join(map(str, values.shape)), " or ".join(map(str, counts))
    raise ValueError(
        f"it has the shape {shape}, but {wanted} channels are needed (--channels of data_prep, "
        "encoder.channels of a recipe)"
    )
