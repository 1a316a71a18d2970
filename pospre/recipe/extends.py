"""Recipes that only state differences from another one: ``extends: other.yaml``."""

from pathlib import Path
from typing import Any

from pospre.errors import UserError
from pospre.recipe.find import find_recipe
from pospre.recipe.yaml_text import read_mapping, write

EXTENDS = "extends"


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the content of a recipe's file, merged with the recipe that it extends.

    Variables are not resolved. See ``merged`` for the rules.
    """
    base, own = read_parts(path)
    return own if base is None else merged(base[1], own)


def read_parts(path: Path) -> tuple[tuple[Path, dict[str, Any]] | None, dict[str, Any]]:
    """Return (path and content of the recipe that ``path`` extends, or None; its own content).

    Raises:
        UserError: a file is missing or invalid, or the extended recipe extends a third.
    """
    own = read_mapping(path)
    if EXTENDS not in own:
        return None, own
    name = own.pop(EXTENDS)
    where = f"recipe {path}: {EXTENDS}: {name}"
    if not isinstance(name, str):
        raise UserError(
            f"{where} must be another recipe: its path, relative to this file, or its name"
        )
    try:
        target = find_recipe(name, beside=path.parent)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    base = read_mapping(target)
    if EXTENDS in base:
        raise UserError(
            f"{where}: {target} itself extends {base[EXTENDS]}, but only one level is allowed; "
            "extend that one, or copy what you need from both"
        )
    base.pop("run_name", None)  # two recipes of the same name would share a run folder
    return (target, base), own


def merged(base: dict[str, Any], own: dict[str, Any], *, within: str = "") -> dict[str, Any]:
    """Return ``base`` updated by ``own``: sections are merged key by key.

    Other values, including lists, replace the base's. Null for a section removes it: an algorithm,
    a view, or options that then take their defaults. It turns a callback off.
    """
    result = dict(base)
    for key, value in own.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            result[key] = merged(before, value, within=key)
        else:
            write(result, key, value, within=within)
    return result
