"""Where a recipe lies: at a path, or under the name of one that comes with pospre."""

from difflib import get_close_matches
from pathlib import Path

from pospre.errors import UserError

# a link to the checkout's yamls/; in a wheel the files themselves
SHIPPED = Path(__file__).parents[1] / "yamls"
_FIRST = "pretrain/"


def find_recipe(given: str | Path, *, beside: Path | None = None) -> Path:
    """Return the file of a recipe.

    Args:
        given: a path; or, where no file is there, the name of a recipe that comes with pospre:
            ``pretrain/mae_vitb16``, ``mae_vitb16`` (that of ``pretrain/``, else the only one), or
            ``yamls/pretrain/mae_vitb16.yaml`` as in a checkout.
        beside: folder that a relative path starts from; by default the current one.

    Raises:
        UserError: no recipe is there, or several have this name.
    """
    path = Path(given) if beside is None else beside / given
    if path.exists() and not path.is_dir():  # a pipe, too
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
        raise UserError(f"recipe {path} is a folder; name a file in it.")
    known = sorted({*names, *(file.stem for file in shipped)})
    near = get_close_matches(name.removesuffix(".yaml"), known)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"recipe {path} does not exist, and no recipe that comes with pospre is called so.{meant} "
        f"`ls {SHIPPED}/*` lists them."
    )
