"""The kinds of data sets, read without importing their modules, so that ``--help`` is fast."""

from pathlib import Path

_NO_KINDS = ("keywords", "registry", "source")

KINDS: dict[str, str] = {
    path.stem: path.read_text(encoding="utf-8").split('"""')[1].partition("\n")[0]
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in _NO_KINDS and not path.stem.startswith("_")
}
"""Names for ``--source``, with a description of one line each."""
