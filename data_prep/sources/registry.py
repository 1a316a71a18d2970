"""The kinds of data sets: the modules of this folder, as ``KINDS`` lists them."""

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from data_prep.files.tree import Tree
from data_prep.sources import KINDS
from data_prep.sources.source import Source
from data_prep.splits import Split
from pospre.data.stores.files import odd_file
from pospre.data.stores.mds import is_mds
from pospre.errors import UserError, suggestion

# kinds that fit any folder, tried last
_FALLBACKS = ("audio_folder", "image_folder")

_MODULES: dict[str, ModuleType] = {
    name: importlib.import_module(f"data_prep.sources.{name}") for name in KINDS
}


def open_source(
    path: Path,
    *,
    kind: str = "auto",
    split: str | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    keywords: str | None = None,
) -> Source:
    """List the samples of a data set of a ``kind`` of ``KINDS``; ``"auto"`` detects it.

    ``split`` and what follows are as in ``Split``. ``UserError`` if the path is not such a data
    set, or is inconsistent.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder or archive of a data set.")
    odd = odd_file(path)
    if odd is not None:
        raise UserError(f"{path} is {odd}; give the folder or archive of a data set.")
    if path.suffix == ".beton" or (path.is_dir() and is_mds(path)):
        what = "a .beton file" if path.suffix == ".beton" else "a folder of MDS shards"
        raise UserError(
            f"{path} is {what}, the result of a conversion; train on it directly "
            f"(data.path={path}), or give the images that it was made from."
        )
    if kind == "auto":
        kind = detect(Tree(path, skip_damaged=True))
    if kind not in _MODULES:
        raise UserError(f"--source {kind}: there is no such kind.{suggestion(kind, KINDS)}")
    source: Source = _MODULES[kind].load(Tree(path), Split(split, val_fraction, seed, keywords))
    names = [item.name for item in source.items]
    if not names:
        raise UserError(f"{path}: {source.split_rule or 'it'} has no sample of the kind {kind}.")
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise UserError(f"{path}: {twice} is listed twice; every sample needs its own name.")
    return replace(source, kind=kind)


def detect(tree: Tree) -> str:
    """Return the kind of a data set; raise UserError unless exactly one fits."""
    special = (name for name in _MODULES if name not in _FALLBACKS)
    kinds = [name for name in special if _MODULES[name].detects(tree)]
    if len(kinds) > 1:
        raise UserError(f"{tree.root} may be {' or '.join(kinds)}; choose with --source.")
    kinds += [name for name in _FALLBACKS if not kinds and _MODULES[name].detects(tree)]
    if not kinds:
        raise UserError(
            f"{tree.root} is a file of no known kind; give a folder, or choose the kind with "
            f"--source ({', '.join(KINDS)})."
        )
    return kinds[0]
