"""Recipe files: found by path or by name, and merged with the recipe that they extend."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pospre.errors import UserError
from pospre.recipe.yaml_text import read_mapping, write

# a link to the checkout's yamls/; in a wheel the files themselves
SHIPPED = Path(__file__).parents[1] / "yamls"
_FIRST = "pretrain/"
EXTENDS = "extends"


def find_recipe(given: str | Path, *, beside: Path | None = None) -> Path:
    """Return the file of a recipe.

    Args:
        given: a path; or, if no such file exists, the name of a recipe that comes with pospre:
            ``pretrain/mae_vitb16``, ``mae_vitb16`` (in ``pretrain/``, or else the only one), or
            ``yamls/pretrain/mae_vitb16.yaml`` as in a checkout.
        beside: base folder of relative paths; default: the current one.

    Raises:
        UserError: there is no such recipe, or several have this name.
    """
    path = Path(given) if beside is None else beside / given
    if path.exists() and not path.is_dir():  # may be a pipe
        return path
    shipped = sorted(SHIPPED.glob("*/*.yaml"))
    names = {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in shipped}
    name = str(given)
    if name.startswith("yamls/"):
        name = name.removeprefix("yamls/").removesuffix(".yaml")
    alike = [known for known in names if known.rpartition("/")[2] == name]
    fitting = [known for known in alike if known.startswith(_FIRST)] or alike
    if name in names or len(fitting) == 1:
        return names[name if name in names else fitting[0]]
    if fitting:
        raise UserError(
            f"{len(fitting)} recipes are called {name}: {', '.join(fitting)}; give one."
        )
    if path.is_dir():
        raise UserError(f"recipe {path} is a folder; give a file in it.")
    known = sorted({*names, *(file.stem for file in shipped)})
    near = [str(file) for file in _beside(path) if file.is_file()]
    near = near or get_close_matches(name.removesuffix(".yaml"), known)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"recipe {path} does not exist, and no recipe of pospre has this name.{meant} "
        f"`ls {SHIPPED}/*` lists them."
    )


def _beside(path: Path) -> list[Path]:
    """Return the names that a recipe at ``path`` may have instead, by its ending."""
    return [path.with_suffix(ending) for ending in (".yaml", ".yml")]


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
