"""Common parsers and checks of the commands."""

import argparse
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from pospre.errors import UserError
from pospre.object_store import is_remote
from pospre.trust import VARIABLE, trust


class Parser(argparse.ArgumentParser):
    """A parser that explains ``key=value`` if a value was written as an option."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with code 2."""
        if option := re.search(r"unrecognized arguments:.* --([\w.]+)(?:[= ](?!-)(\S+))?", message):
            message += f" (a key is written without dashes: {option[1]}={option[2] or 'VALUE'})"
        super().error(message)


def command_parser(
    command: str, description: str | None, epilog: str = "", kind: type[Parser] = Parser
) -> Any:
    """Return a parser of a module; the command adds its options. The texts are printed unchanged.

    A ``kind`` of its own may make the help when it is asked for.
    """
    return kind(
        prog=f"python -m {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def recipe_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser of ``RECIPE [key=value …]``, see ``command_parser``."""
    parser = command_parser(command, description, epilog)
    parser.add_argument("recipe", help="YAML file, or the name of a recipe of pospre: mae_vitb16")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="change a value of the recipe, for instance trainer.max_duration=2ep",
    )
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust NAME`` to a command that reads recipes which a stranger may have written."""
    parser.add_argument(
        "--trust",
        type=lambda name: trust([name]),
        metavar="NAME",
        help="a module or package whose classes may be imported, such as mylab.loca, or an "
        f"environment variable that data addresses may contain; repeatable, also {VARIABLE}=A,B",
    )


def check_exists(option: str, address: str, remedy: str) -> None:
    """Check that an input exists, before imports that take seconds.

    Args:
        option: names the address in messages.
        address: a file or folder, ``timm:NAME,FILE`` or ``FILE,WORD``. Buckets are not checked.
        remedy: what the user should give.

    Raises:
        UserError: it is not there.
    """
    path = address.partition(",")[2] if address.startswith("timm:") else address
    commas = [match.start() for match in re.finditer(",", path)]  # as FILE,positions=none
    starts = (path[:end] for end in (len(path), *commas))
    if not path or is_remote(path) or "://" in path:
        return
    if not any(map(os.path.lexists, starts)):
        raise UserError(f"{option} {path} does not exist; {remedy}.")


def check_model(option: str, address: str) -> None:
    """Check that a model exists, see ``check_exists``."""
    remedy = "give a run folder, a checkpoint or a file of weights"
    check_exists(option, address, remedy + weights_hint(address))


def local_path(text: str) -> Path:
    """Return a path; ``UserError`` for an address, which ``Path`` would change."""
    if is_remote(text) or "://" in text:
        raise UserError(
            f"{text} is an address, but a path on this machine is needed; copy from and to buckets "
            "with `aws s3 sync` or `aws s3 cp`"
        )
    return Path(text)


class LocalPath(argparse.Action):
    """Keeps an argument as ``local_path``, whose error argparse would not show as a ``type``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep the path; None if none is given."""
        setattr(namespace, self.dest, None if values is None else local_path(values))


def weights_hint(address: str) -> str:
    """Return, to be added to a remedy, what a name may mean that is no file of weights."""
    if re.fullmatch(r"[A-Za-z]\w*(\.\w+)?", address):
        name = address.partition(".")[0]
        return f"; if it is a timm model, timm:{name},FILE with its weights in a file"
    if re.fullmatch(r"[\w-]+/[\w.-]+", address):
        return (
            "; if it is a model of a hub, save its weights to a file first (pospre downloads "
            "nothing) and give FILE, or timm:NAME,FILE"
        )
    return ""


def spelled(value: Any) -> str:
    """Return a plain value as recipes and the command line spell it."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {spelled(each)}' for key, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
