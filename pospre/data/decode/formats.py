"""Formats that Pillow does not read: arrays in ``.npy`` and TIFF files; advice about others."""

import io
import zlib
from typing import Any, Literal

import numpy as np
from PIL import Image, features

NPY_START = b"\x93NUMPY"
TIFF_STARTS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
_ORIENTATION = "Orientation"
_HEIF_CONVERT = "heif-convert (apt install libheif-examples)"
_DARKTABLE = "darktable-cli (apt install darktable)"
_DJXL = "djxl (apt install libjxl-tools)"


def _converted(name: str, tool: str) -> str:
    return f"{name}, which Pillow cannot read; make a PNG or JPEG of it first, with {tool}"


RAW = _converted("a camera's raw file", _DARKTABLE)
# Place and first bytes of other pictures, their name, and a program that turns them into PNG.
_PICTURES = (
    *((4, b"ftyp" + brand, "HEIC", _HEIF_CONVERT)
      for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")),
    (0, b"\xff\x0a", "JPEG XL", _DJXL),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL", _DJXL),
    (0, b"%PDF", "PDF", "pdftoppm (apt install poppler-utils)"),
    (4, b"ftypcrx", "a camera's raw file", _DARKTABLE),
    (0, b"FUJIFILMCCD", "a camera's raw file", _DARKTABLE),
    *((0, start, "a camera's raw file", _DARKTABLE)
      for start in (b"IIU\0", b"IIRO", b"IIRS", b"MMOR", b"FOVb", b"\0MRM")),
    (0, b"v/1\x01", "OpenEXR", "exrtopng (apt install exrtools)"),
    (0, b"#?RADIANCE", "Radiance HDR", "ra_ppm (apt install radiance)"),
    (128, b"DICM", "DICOM", "dcmj2pnm (apt install dcmtk)"),
    (4, b"ftyp", "a film", "ffmpeg (apt install ffmpeg)"),
)  # fmt: skip
_SVG_TOOL = "rsvg-convert (apt install librsvg2-bin)"
_OTHERS = (
    (b"PK\x03\x04", "a zip; unpack it"),
    (b"\x1f\x8b", "compressed by gzip; unpack it"),
    (b"version https://git-lfs", "only a pointer; git lfs pull fetches the file itself"),
)
# Common formats that Pillow reads, with both kinds of TIFF's byte order.
_OWN = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG", "PNG"),
    (0, b"GIF8", "GIF"),
    (8, b"WEBP", "WebP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (4, b"jP  \r\n", "JPEG 2000"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
)
_START = 1024  # bytes that identify a text format
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_PNG_ORIENTED = (b"Raw profile type ", b"XML:com.adobe.xmp")  # keywords with EXIF or XMP
_LONGEST_TEXT = 1 << 16  # bytes
# tags of a TIFF; values of PhotometricInterpretation that are pixels of a sensor
_NEW_SUBFILE, _OLD_SUBFILE, _PHOTOMETRIC, _DNG_VERSION = 254, 255, 262, 50706
_SHORT = 3  # the type of a value of two bytes
_SENSOR = (32803, 34892)


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


def open_picture(data: bytes) -> Image.Image:
    """Open an image with Pillow, a PNG without its texts and colour profile.

    Pillow refuses large or damaged ones; other programs show such a PNG.
    """
    return Image.open(io.BytesIO(_without_texts(data) if data.startswith(_PNG_START) else data))


def _without_texts(png: bytes) -> bytes:
    """Leave out chunks that do not change pixels: texts, profiles, and optional damaged ones.

    Texts that may say which side is up stay unless they are long.
    """
    parts, start, at = [], 0, len(_PNG_START)
    while at + 12 <= len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        end = at + 12 + size
        if kind == b"IEND" or end > len(png):
            break
        if kind[0] & 0x20:  # optional
            content, checksum = png[at + 4 : end - 4], int.from_bytes(png[end - 4 : end], "big")
            is_kept = kind not in _PNG_TEXTS or (
                content.startswith(_PNG_ORIENTED, 4) and size <= _LONGEST_TEXT
            )
            if not is_kept or zlib.crc32(content) != checksum:
                parts.append(png[start:at])
                start = end
        at = end
    return b"".join([*parts, png[start:]]) if parts else png


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


def is_raw(data: bytes) -> bool:
    """Return whether a TIFF is a camera's raw file, by its first kilobyte or more.

    Pillow reads the first directory, which then has a thumbnail, or pixels of a sensor.
    """
    if not data.startswith(TIFF_STARTS[:2]):
        return False
    if data[8:10] == b"CR":  # Canon
        return True
    order: Literal["little", "big"] = "little" if data[:1] == b"I" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], order)

    start, tags = number(4, 4), {}
    for at in range(start + 2, min(start + 2 + 12 * number(start, 2), len(data)), 12):
        tags[number(at, 2)] = number(at + 8, 2 if number(at + 2, 2) == _SHORT else 4)
    return (
        bool(tags.get(_NEW_SUBFILE, 0) & 1)
        or tags.get(_OLD_SUBFILE) == 2
        or tags.get(_PHOTOMETRIC) in _SENSOR
        or _DNG_VERSION in tags
    )


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


def own_format(data: bytes) -> str | None:
    """Return the name of a common format that Pillow reads, by a file's first kilobyte."""
    if is_raw(data):
        return None
    return next((name for at, magic, name in _OWN if data[at : at + len(magic)] == magic), None)


def why_unknown(data: bytes) -> str:
    """Explain why Pillow does not take bytes for an image, and what to do about it."""
    name = own_format(data)  # then it is damaged
    if name == "AVIF" and not features.check("avif"):
        return "AVIF, which this Pillow was built without; pip install 'pillow>=11.3'"
    if name == "TIFF":
        return "TIFF, but damaged, or of bands that only --channels and encoder.channels take"
    if name is not None:
        return f"{name}, but damaged or of a kind that Pillow does not read"
    return foreign_format(data) or "no image format that Pillow knows"


def foreign_format(data: bytes) -> str | None:
    """Return a known format that Pillow cannot read, with advice, by a file's first kilobyte."""
    for at, magic, name, tool in _PICTURES:
        if data[at : at + len(magic)] == magic:
            return _converted(name, tool)
    if is_raw(data):
        return RAW
    for magic, what in _OTHERS:
        if data.startswith(magic):
            return what
    text = data[:_START].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<?xml", b"<svg", b"<!--")) and b"<svg" in text:
        return _converted("SVG", _SVG_TOOL)
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page; download the file itself"
    return None
