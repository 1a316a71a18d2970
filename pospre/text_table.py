"""Plain-text tables for the terminal."""

from collections.abc import Sequence

from pospre.errors import printable


def format_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """Return a table: first column flush left, the others flush right, notes below.

    Args:
        title: one line above the table.
        header: one word per column.
        rows: one sequence of cells per row, each as long as ``header``.
        notes: lines below the table.
    """
    header, *rows = ([printable(cell) for cell in row] for row in (header, *rows))
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = "  ".join("─" * width for width in widths)
    title, *notes = (printable(line, keep="\n") for line in (title, *notes))
    lines = [title, "", _line(header, widths), rule]
    lines += [_line(row, widths) for row in rows]
    return "\n".join([*lines, rule, *notes])


def percent(rate: float | None) -> str:
    """Return a rate in [0, 1] as a percentage with two decimals, without the sign; – for None."""
    return "–" if rate is None else f"{100 * rate:.2f}"


def percent_and_error(rate: float | None, error: float | None) -> str:
    """Return a rate and its standard error, if there is one, as ``percent`` writes them."""
    return percent(rate) + ("" if rate is None or error is None else f" ± {percent(error)}")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([first, *rest]).rstrip()
