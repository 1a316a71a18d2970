"""The kinds of data sets, read without importing their modules, so that ``--help`` is fast."""

import ast
from pathlib import Path

_NO_KINDS = ("keywords", "registry", "source")


def _first_line(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


KINDS: dict[str, str] = {
    path.stem: _first_line(path)
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in _NO_KINDS and not path.stem.startswith("_")
}
"""Names for ``--source``, with a description of one line each."""
