"""Texts and lists that users wrote, on any system."""

import codecs
from pathlib import Path

from pospre.errors import UserError


def decode_text(data: bytes) -> str:
    """Return a text in UTF-8, or in UTF-16 with its mark, as Windows saves both.

    Raises:
        ValueError: it is in another encoding; the message says how to save it.
    """
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error}); save it as UTF-8") from error
    if "\0" in text:  # also UTF-16 without its mark
        raise ValueError("it contains NUL characters, so it is not UTF-8; save it as UTF-8")
    return text


def text_lines(text: str) -> list[str]:
    """Return the lines that are not blank, without blanks around them."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def read_text(path: Path, name: str = "") -> str:
    """Return the text of a file; ``UserError`` names it ``name``, or else by its path."""
    try:
        return decode_text(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{name or path} cannot be read ({error}).") from error


def read_list(path: Path, name: str = "") -> list[str]:
    """Return the lines of a file as in ``text_lines``; errors are those of ``read_text``."""
    return text_lines(read_text(path, name))
