"""Output files of commands: checked before the work, and written atomically."""

import io
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pospre.atomic_file import nearest_existing, write_atomic
from pospre.errors import UserError, needing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = (".png", ".pdf", ".svg")


def check_output(option: str, path: Path | None, *endings: str) -> None:
    """Check before the work that a result can be written.

    Args:
        option: name of the path in messages.
        path: of a file, in folders that exist or can be made; None is always valid.
        endings: allowed file endings; empty: all.

    Raises:
        UserError: it cannot be written.
    """
    if path is None:
        return
    if endings and path.suffix not in endings:
        raise UserError(f"{option} {path} must end in {' or '.join(endings)}.")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; give a file in it.")
    nearest = nearest_existing(path.absolute().parent)
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be written: {nearest} is not a writable folder "
            f"({error.strerror}); give another one."
        ) from error


def check_picture(option: str, path: Path | None) -> None:
    """Check before the work that a picture can be drawn, as ``check_output`` does."""
    check_output(option, path, *_PICTURES)
    if path is not None:
        with needing("convert", f"the picture {path}"):
            import_module("matplotlib")


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file atomically, and make its folders.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def save_picture(figure: "Figure", path: Path, dpi: int) -> None:
    """Write a figure as ``write_output`` does."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=dpi)
    write_output(path, buffer.getvalue())
