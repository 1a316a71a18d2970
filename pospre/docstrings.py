"""Docstrings, read from a file's text: importing an evaluation takes seconds.

An option is a field of a class, and the docstring below it, which Python does not keep, is the only
place that says what the option means.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc, get_annotations, signature
from pathlib import Path


@cache
def docstrings(path: Path) -> dict[str, str]:
    """Return a file's docstrings by dotted name, such as ``Knn.bank``; ``""`` is its own."""
    return dict(_docstrings(ast.parse(path.read_text(encoding="utf-8")), "", ""))


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str, prefix: str
) -> Iterator[tuple[str, str]]:
    yield name, ast.get_docstring(node) or ""
    for part, below in zip(node.body, [*node.body[1:], None], strict=True):
        match part, below:
            case (
                ast.AnnAssign(target=ast.Name(id=field)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield prefix + field, cleandoc(text)
            case ast.ClassDef(name=inner), _:
                yield from _docstrings(part, prefix + inner, f"{prefix}{inner}.")
            case ast.FunctionDef(name=inner), _:
                yield from _docstrings(part, prefix + inner, f"{prefix}{inner}.<locals>.")


def option_names(kind: type) -> list[str]:
    """Return the names of a class's options, own ones before those of its bases."""
    annotated = [name for base in kind.__mro__ for name in get_annotations(base)]
    options = signature(kind).parameters
    return [name for name in dict.fromkeys([*annotated, *options]) if name in options]


def meanings(kind: type) -> dict[str, str]:
    """Return what the options of a class mean, one line each, by the nearest base that says it."""
    described: dict[str, str] = {}
    options = option_names(kind)
    for base in reversed(kind.__mro__):
        declared = get_annotations(base).keys() & {*options}
        path = Path(getattr(sys.modules.get(base.__module__), "__file__", None) or "")
        if declared and path.suffix == ".py":
            texts_of = docstrings(path)
            texts = {name: texts_of.get(f"{base.__qualname__}.{name}") for name in declared}
            described |= {name: " ".join(text.split()) for name, text in texts.items() if text}
    return {name: described[name] for name in options if name in described}
