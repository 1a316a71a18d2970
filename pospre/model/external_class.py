"""Classes of other packages, given as ``package.module:Class`` in a recipe."""

import importlib
import traceback
from pathlib import Path
from typing import Any

from pospre.errors import UserError, suggestion
from pospre.trust import is_trusted, remedy


class UntrustedClass(UserError):
    """A class of another package that the user did not say to trust."""


def load_class(address: str) -> type[Any]:
    """Import and return the class ``package.module:Class``.

    Raises:
        UserError: the module is missing or raises an error, or does not have the class.
        UntrustedClass: the recipe may be a stranger's, and the module is not trusted.
    """
    home, _, name = address.partition(":")
    module = _imported(home, address)
    loaded = getattr(module, name, None)
    if not isinstance(loaded, type):
        classes = [key for key, each in vars(module).items() if isinstance(each, type)]
        what = "has none" if loaded is None else f"has a {type(loaded).__name__}"
        raise UserError(
            f"algorithms: '{address}' names the class '{name}', and {home} {what} of that name."
            f"{suggestion(name, classes)}"
        )
    return loaded


def _imported(home: str, address: str) -> Any:
    if not all(part.isidentifier() for part in home.split(".")):
        raise UserError(
            f"algorithms: '{address}' has no module name; write package.module:Class, such as "
            "mylab.loca:LOCA."
        )
    if not is_trusted(home):
        raise UntrustedClass(
            f"algorithms: '{address}' is a class of another package, and importing {home} runs "
            f"its code. {remedy(home)}; in Python, import it first."
        )
    try:
        return importlib.import_module(home)
    except (Exception, SystemExit) as error:  # a module runs any code when it is imported
        absent = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{home}.".startswith(f"{absent}."):
            raise UserError(
                f"algorithms: '{address}' is not found: there is no module '{absent}' in "
                f"{Path.cwd()} or among the installed packages. Run the command in its folder, "
                "add its folder to PYTHONPATH, or install it."
            ) from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        if isinstance(error, SyntaxError):  # the module's own line is not among the frames
            where = f"{error.filename}, line {error.lineno}"
        raise UserError(
            f"algorithms: '{address}' cannot be imported: {type(error).__name__}: {error} "
            f"({where}). `python -c 'import {home}'` shows the full traceback."
        ) from error
