"""The words of the code: an identifier has one meaning."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A token has a place (pospre/nn/places.py); paths, indices and devices have names of their own.
WORDS = {"place": "pospre/nn/"}


def identifiers(tree: ast.AST) -> set[str]:
    """Return every name that a file's code gives or reads."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            found.add(getattr(node, field, None))
    return {name for name in found if isinstance(name, str)}


@pytest.mark.parametrize(("word", "home"), WORDS.items())
def test_a_word_stays_where_it_has_its_meaning(word: str, home: str) -> None:
    for path in (*ROOT.glob("pospre/**/*.py"), *ROOT.glob("data_prep/**/*.py")):
        is_home = path.relative_to(ROOT).as_posix().startswith(home)
        assert is_home or word not in identifiers(ast.parse(path.read_text("utf-8"))), path
