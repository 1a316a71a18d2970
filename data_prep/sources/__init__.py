"""The kinds of data sets, read without importing their modules, so that ``--help`` is fast."""

from pathlib import Path

from pospre.docstrings import docstrings

_NO_KINDS = ("keywords", "registry", "source")

KINDS: dict[str, str] = {
    path.stem: docstrings(path)[""].partition("\n")[0]
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in _NO_KINDS and not path.stem.startswith("_")
}
"""Names for ``--source``, with a description of one line each."""
