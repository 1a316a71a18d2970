"""A table in Markdown, for the benchmarks and drills."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    rule = "|---" * len(header) + "|"
    head, *lines = (f"| {' | '.join(row)} |" for row in (header, *rows))
    return "\n".join([head, rule, *lines])
