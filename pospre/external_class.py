"""Classes of other packages, given as ``package.module:Class`` in a recipe."""

import importlib
import traceback
from pathlib import Path
from typing import Any

from pospre.errors import UserError, suggestion
from pospre.trust import is_trusted, remedy


def address_of(kind: Any) -> Any:
    """Return ``package.module:Class`` of a class; what is no class as it is."""
    return f"{kind.__module__}:{kind.__qualname__}" if isinstance(kind, type) else kind


class UntrustedClass(UserError):
    """A class of another package that the user did not say to trust."""


def load_class(address: str, key: str, example: str) -> type[Any]:
    """Import and return the class ``package.module:Class``.

    Args:
        address: its module and name.
        key: the recipe's key, for errors.
        example: another address, for errors.

    Raises:
        UserError: the module is missing or raises an error, or does not have the class.
        UntrustedClass: the recipe may be a stranger's, and the module is not trusted.
    """
    home, _, name = address.partition(":")
    module = _imported(home, address, key, example)
    loaded = getattr(module, name, None)
    if not isinstance(loaded, type):
        classes = [key for key, each in vars(module).items() if isinstance(each, type)]
        what = "has none" if loaded is None else f"has a {type(loaded).__name__}"
        raise UserError(
            f"{key}: '{address}' names the class '{name}', and {home} {what} of that name."
            f"{suggestion(name, classes)}"
        )
    return loaded


def _imported(home: str, address: str, key: str, example: str) -> Any:
    if not all(part.isidentifier() for part in home.split(".")):
        raise UserError(
            f"{key}: '{address}' has no module name; write package.module:Class, such as {example}."
        )
    if not is_trusted(home):
        raise UntrustedClass(
            f"{key}: '{address}' is a class of another package, and importing {home} runs "
            f"its code. {remedy(home)}; in Python, import it first."
        )
    try:
        return importlib.import_module(home)
    except (Exception, SystemExit) as error:  # a module runs any code when it is imported
        absent = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{home}.".startswith(f"{absent}."):
            raise UserError(
                f"{key}: '{address}' is not found: there is no module '{absent}' in "
                f"{Path.cwd()} or among the installed packages. Run the command in its folder, "
                "add its folder to PYTHONPATH, or install it."
            ) from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        if isinstance(error, SyntaxError):  # the module's own line is not among the frames
            where = f"{error.filename}, line {error.lineno}"
        raise UserError(
            f"{key}: '{address}' cannot be imported: {type(error).__name__}: {error} "
            f"({where}). `python -c 'import {home}'` shows the full traceback."
        ) from error
