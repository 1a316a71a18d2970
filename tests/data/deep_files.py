"""Small image files of more than 8 bits per value, and of several bands."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RAMP = np.add(*np.mgrid[:32, :48]) / 78  # 0 to 1


def png16(values: np.ndarray, colour_type: int) -> bytes:
    """A PNG of 16 bits per value: Pillow writes grey ones only. 2 is colour, 4 grey and alpha."""
    height, width = values.shape[:2]
    rows = values.reshape(height, -1).astype(">u2")
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def saved(values: np.ndarray, kind: str = "TIFF", **options: Any) -> bytes:
    """The bytes of an image file of an array."""
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, kind, **options)
    return buffer.getvalue()


def npy(values: np.ndarray) -> bytes:
    """The bytes of an ``.npy`` file."""
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def bands(number: int, channels: int = 6, kind: Any = np.uint16) -> np.ndarray:
    """Smooth bands (36, 44, channels) that differ, with values up to 3500."""
    y, x = np.mgrid[:36, :44]
    waves = [np.sin(0.1 * (number + 1) * x + 0.2 * c * y) for c in range(channels)]
    return (2000 + 1500 * np.stack(waves, axis=-1)).astype(kind)


def band_folder(root: Path, channels: int = 6, num_images: int = 12) -> Path:
    """A folder of ``.npy`` files in two classes, some of them with the bands first."""
    for number in range(num_images):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        values = bands(number, channels)
        np.save(folder / f"{number:03}.npy", np.moveaxis(values, 2, 0) if number % 3 else values)
    return root
