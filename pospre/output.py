"""Output of commands: tables, and files that are checked before the work."""

import io
import tempfile
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pospre.atomic_file import nearest_existing, write_atomic
from pospre.errors import UserError, needing, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = (".png", ".pdf", ".svg")


def check_output(option: str, path: Path | None, *endings: str) -> None:
    """Check before the work that a result can be written.

    Args:
        option: name of the path in messages.
        path: path of a file; its folders exist or can be made. None is always valid.
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


def format_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """Return a table: first column flush left, the others flush right, notes below.

    Args:
        title: one line above the table.
        header: one word per column.
        rows: one sequence of cells per row, each as long as ``header``; without any, there are
            only title and notes.
        notes: lines below the table.
    """
    title, *notes = (printable(line, keep="\n") for line in (title, *notes))
    if not rows:
        return "\n".join([title, *notes])
    header, *rows = ([printable(cell) for cell in row] for row in (header, *rows))
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = "  ".join("─" * width for width in widths)
    lines = [title, "", _line(header, widths), rule]
    lines += [_line(row, widths) for row in rows]
    return "\n".join([*lines, rule, *notes])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([first, *rest]).rstrip()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([markdown_row(header), "|---" * len(header) + "|", *map(markdown_row, rows)])


def markdown_row(cells: Iterable[str]) -> str:
    """Return a line of a table in Markdown."""
    text = " | ".join(cell.replace("|", "\\|") for cell in cells)
    return f"| {text} |"
