"""A hash of the code that some modules import: equal as long as what they compute cannot change."""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    *("reporting", "run", "certificate", "planning", "exporting", "embedding"),
    *("data.bucket", "object_store", "bucket_errors", "attempts", "atomic_file", "scratch"),
    *("errors", "output", "command_line", "docstrings", "option_texts", "model.refusals"),
    *("arguments", "external_class", "installed", "trust", "evaluation.drawing", "recipe"),
    *("nn.lora", "nn.lora_options", "nn.swin", "nn.weights", "model.reference", "model.stages"),
    *("model.stage_times", "training.stages", "training.foreign", "training.weight_files"),
    *("training.start_encoder", "training.start_weights", "evaluation.models"),
    *("evaluation.classification.settings", "evaluation.dense.settings"),
    *("evaluation.position.settings", "evaluation.common_settings", "evaluation.registry"),
)
"""Parts of ``pospre`` that training imports and that change no figure of a run from scratch on a
local folder: pages, buckets, messages, what recipes and settings mean (they are hashed themselves),
how weights are read, and stages."""
DOORS = ("pospre", "pospre.algorithms")
"""Packages that import all their parts, to name them: a run uses few."""


def code_hash(modules: Iterable[str]) -> str:
    """Return a hash of all files of ``pospre`` that these modules import, also inside functions.

    Comments, docstrings and layout do not count.
    """
    found: dict[str, str] = {}
    todo = list(modules)
    while todo:
        module = todo.pop()
        path = _file_of(module)
        if path is not None and module not in found:
            found[module], imported = _read(path)
            todo += imported
    text = "\n".join(f"{module} {code}" for module, code in sorted(found.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _file_of(module: str) -> Path | None:
    """Return the file of one of our modules, None for those of others, of ``OUTSIDE``, doors."""
    outside = any(f"{module}.".startswith(f"pospre.{name}.") for name in OUTSIDE)
    if outside or module in DOORS or not module.startswith("pospre."):
        return None
    path = ROOT.joinpath(*module.split("."))
    paths = path.with_suffix(".py"), path / "__init__.py"
    return next((path for path in paths if path.exists()), None)


@cache
def _read(path: Path) -> tuple[str, list[str]]:
    """Return a file's code, and the names of all modules that it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return ast.dump(_without_docstrings(tree)), _imported(tree)


def _imported(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}", *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return names


def _without_docstrings(tree: ast.AST) -> ast.AST:
    """Return a tree without the strings that stand alone, which no program reads."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
