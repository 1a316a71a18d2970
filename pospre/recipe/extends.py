"""Recipes that say only what differs from another one: ``extends: other.yaml``."""

from pathlib import Path
from typing import Any

from pospre.errors import UserError
from pospre.recipe.find import find_recipe
from pospre.recipe.yaml_text import read_mapping, write

EXTENDS = "extends"


def read_recipe(path: Path) -> dict[str, Any]:
    """Return what a recipe's file says, with what it takes over from the one that it extends.

    Variables are not resolved. See ``merged`` for what counts.
    """
    base, own = read_parts(path)
    return own if base is None else merged(base[1], own)


def read_parts(path: Path) -> tuple[tuple[Path, dict[str, Any]] | None, dict[str, Any]]:
    """Return (path and content of the recipe that ``path`` extends, or None; its own content).

    Raises:
        UserError: a file is missing or no recipe, or the other one extends a third.
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
            f"{where}: {target} extends {base[EXTENDS]} itself, and only one level is read; extend "
            "that one, or copy what you need of both"
        )
    base.pop("run_name", None)  # two recipes with one name would share a run folder
    return (target, base), own


def merged(base: dict[str, Any], own: dict[str, Any], *, within: str = "") -> dict[str, Any]:
    """Return ``base`` with what ``own`` gives: sections are merged key by key.

    Any other value, a list too, takes the place of the base's. Null instead of a section takes the
    base's away: an algorithm, a view, or what is then at its defaults; it turns a callback off.
    """
    result = dict(base)
    for key, value in own.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            result[key] = merged(before, value, within=key)
        else:
            write(result, key, value, within=within)
    return result
