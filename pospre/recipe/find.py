"""Finding a recipe by path, or by name among those that come with pospre."""

from difflib import get_close_matches
from pathlib import Path

from pospre.errors import UserError

# a link to the checkout's yamls/; in a wheel the files themselves
SHIPPED = Path(__file__).parents[1] / "yamls"
_FIRST = "pretrain/"


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
    near = get_close_matches(name.removesuffix(".yaml"), known)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"recipe {path} does not exist, and no recipe of pospre has this name.{meant} "
        f"`ls {SHIPPED}/*` lists them."
    )
