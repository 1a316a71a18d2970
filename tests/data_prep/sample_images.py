"""Small image files, good, odd and damaged, for the conversion's tests."""

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int = 0, width: int = 48, height: int = 32) -> Image.Image:
    """A smooth picture, different for every number, whose four corners differ."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    phase = 0.7 * number
    channels = [np.sin(5 * x + phase), np.cos(4 * y + phase), x - y]
    pixels = np.stack([127 + 100 * channel for channel in channels], axis=-1)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """The image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    """EXIF with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def rotated_jpeg(number: int, orientation: int) -> bytes:
    """A JPEG with an EXIF orientation."""
    return encoded(picture(number), exif=turned(orientation))


def dds(pixel_format_flags: int) -> bytes:
    """A DDS whose pixel format makes no sense: 24 bits, and masks of none."""
    header = struct.pack("<7I44x", 124, 0x1007, 4, 4, 0, 0, 0)
    pixel_format = struct.pack("<8I", 32, pixel_format_flags, 0, 24, 0, 0, 0, 0)
    return b"DDS " + header + pixel_format + bytes(20 + 64)


def odd_files() -> dict[str, bytes]:
    """Readable files of many kinds, in one class folder ``odd``, and one plain JPEG elsewhere."""
    deep = np.linspace(0, 65535, 32 * 48).reshape(32, 48).astype(np.uint16)
    image = picture(3)
    return {
        "odd/alpha.png": encoded(image.convert("RGBA"), "PNG"),
        "odd/animated.gif": encoded(
            image.quantize(64), "GIF", save_all=True, append_images=[picture(11).quantize(64)]
        ),
        "odd/bitmap.bmp": encoded(image, "BMP"),
        "odd/cmyk.jpg": encoded(image.convert("CMYK")),
        "odd/deep.png": encoded(Image.fromarray(deep), "PNG"),
        "odd/float.tiff": encoded(Image.fromarray((deep / 65535).astype(np.float32)), "TIFF"),
        "odd/grey.JPEG": encoded(image.convert("L")),
        "odd/nested/deeper/plain.jpeg": encoded(picture(4)),
        "odd/no_extension": encoded(picture(5)),
        "odd/one_bit.png": encoded(image.convert("1"), "PNG"),
        "odd/palette.png": encoded(image.quantize(16), "PNG"),
        "odd/really_a_png.jpg": encoded(image, "PNG"),
        "odd/rotated.jpg": rotated_jpeg(6, 6),
        "odd/web.webp": encoded(image, "WEBP"),
        "plain/a.jpg": encoded(picture(7)),
    }


KEPT = {"odd/grey.JPEG", "odd/nested/deeper/plain.jpeg", "odd/no_extension", "plain/a.jpg"}


def bad_files() -> dict[str, bytes]:
    """Files that claim to be images and cannot be read."""
    good = encoded(picture(8, 200, 150), quality=95)
    return {
        "plain/cut.jpg": good[: len(good) // 2],
        "plain/empty.jpg": b"",
        "plain/text.jpg": b"this is no image\n",
        "plain/cut.png": encoded(picture(9, 90, 90), "PNG")[:400],
    }


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    """Write files below a root and return it."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root
