"""The structure of the code: no circles of imports, and identifiers of one meaning."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A token has a place (pospre/nn/places.py); paths, indices and devices have names of their own.
WORDS = {"place": "pospre/nn/"}
FILES = sorted(
    path.relative_to(ROOT)
    for top in ("pospre", "data_prep")
    for path in ROOT.glob(f"{top}/**/*.py")
)
TREES = {path: ast.parse((ROOT / path).read_text("utf-8")) for path in FILES}


def identifiers(tree: ast.AST) -> set[str]:
    """Return every name that a file's code gives or reads."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            found.add(getattr(node, field, None))
    return {name for name in found if isinstance(name, str)}


def imported(tree: ast.AST) -> set[str]:
    """Return every module, or name in one, that a file imports anywhere, also for types only."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}", *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {".".join(path.with_suffix("").parts): path for path in FILES}
    # a package's own file is imported with each of its modules
    modules = {name: imported(TREES[path]) & names.keys() for name, path in names.items()}
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


@pytest.mark.parametrize(("word", "home"), WORDS.items())
def test_a_word_stays_where_it_has_its_meaning(word: str, home: str) -> None:
    for path, tree in TREES.items():
        assert path.as_posix().startswith(home) or word not in identifiers(tree), path
