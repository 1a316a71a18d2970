"""Errors for users: a mistake or a missing peer gives one message and no traceback."""

import difflib
import errno
import logging
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import requires
from pathlib import Path
from typing import Any

_LONGEST = 4000  # characters of a message
_LISTED = 40  # maximal number of names in a message; timm has hundreds
_FFCV_NEEDS = "g++ python3-dev pkg-config libopencv-dev libturbojpeg0-dev"
_UNDONE = "before the end: nothing is half written; run the same command again"
_format_warning = warnings.formatwarning


def printable(text: object, keep: str = "") -> str:
    """Return a text whose control characters are escaped, so that a terminal only shows them.

    Names of files, hosts and tensors may come from anyone. The characters in ``keep`` stay.
    """
    return "".join(
        letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1]
        for letter in str(text)
    )


class UserError(ValueError):
    """A mistake that the user can fix; its message names the key or path, the value and the remedy.

    The message is safe to print: escapes are removed, and very long texts are truncated. ``code``
    is the exit code.
    """

    code = 2

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST * 3 // 4]} […] {text[-_LONGEST // 4 :]}"
        return printable(text, keep="\n\t")

    def restated(self, text: str) -> "UserError":
        """Return an error with this exit code and another message."""
        return (Unreachable if isinstance(self, Unreachable) else UserError)(text)


class Unreachable(UserError):
    """A server or another rank does not answer now; it may later."""

    code = 69  # EX_UNAVAILABLE: a script that starts commands may retry a few times


class Stopped(Exception):
    """A command that was ended by the signal ``number`` and can be resumed.

    ``text``: progress, what is saved, and how to resume.
    """

    def __init__(self, number: int, text: str) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {name} {text}")
        self.code = 130 if number == signal.SIGINT else 75


class Lost(Exception):
    """A command that ends because another rank has ended or does not answer.

    ``text``: which rank, why, and how to resume; empty if another rank prints it.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def stoppable(text: str) -> Iterator[None]:
    """Turn a signal that ends this block into ``Stopped``; ``text`` says what is kept.

    Composer installs handlers on import; they call ``sys.exit``.
    """
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(signal.SIGINT, text) from error
    except SystemExit as error:
        if error.code not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise
        raise Stopped(int(error.code) - 128, text) from error


def to_install(*extras: str) -> str:
    """Return the command that installs extras of the package, see ``pyproject.toml``."""
    checkout = Path(__file__).parents[1]
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if (checkout / "pyproject.toml").is_file():
        wanted = shlex.quote(f"{checkout}[{','.join(extras)}]")
        return f"`make setup` in {checkout} installs it, as does `{pip} -e {wanted}`"
    # from a wheel: no index has pospre, but it has all dependencies of the extras
    marks = [f'extra == "{extra}"' for extra in extras]
    brought = [text.partition("; ") for text in requires("pospre") or ()]
    wanted = " ".join(shlex.quote(name) for name, _, mark in brought if mark in marks)
    built = f"after `apt-get install {_FFCV_NEEDS}` (Debian, Ubuntu) " if "ffcv" in extras else ""
    return f"{built}`{pip} {wanted}` installs it"


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Import an optional package for ``what``; if it is missing, say how to install ``extra``."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("pospre", "data_prep"):
            raise
        raise UserError(
            f"{what} needs {error.name}, which is not installed; {to_install(extra)}."
        ) from error


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest of ``known``, or list them if none is near."""
    names = sorted(known) or ["none"]
    small = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(str(word).lower(), small, n=1)
    if near:
        return f" Did you mean '{small[near[0]]}'?"
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f" Known: {', '.join(names[:_LISTED])}{more}."


def run_command(main: Callable[[], int]) -> int:
    """Run a command-line entry and return its exit code.

    2 for a ``UserError`` and for too little memory, 69 for an ``Unreachable``, 75 for SIGTERM, 130
    for Ctrl-C. For ``Lost``: 75, or the code of the rank that ended.
    """
    warnings.formatwarning = _printable_warning
    # before torch loads OpenMP: otherwise its waiting threads spin. That slows everything else on
    # these cores: other runs, other ranks, the loader's threads
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # where torchao is installed, Composer's imports load it: two lines of its own deprecated calls
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    try:
        with stoppable(_UNDONE):
            return main()
    except UserError as error:
        if int(os.environ.get("RANK", "0")) > 0:
            # rank 0 usually has the same error: it prints it, and the launcher ends the others
            time.sleep(5)
        _come_to_the_end()
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except Stopped as stop:
        _come_to_the_end()
        if int(os.environ.get("RANK", "0")) == 0:
            print(stop, file=sys.stderr)
        return stop.code
    except Lost as lost:
        if str(lost):
            print(f"error: {lost}", file=sys.stderr)
        return lost.code
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # of a path given by the user
            raise
        print(f"error: {UserError(str(error))}", file=sys.stderr)
        return UserError.code
    except (MemoryError, RuntimeError) as error:
        text = str(error).rpartition("] ")[2]  # torch's begins with its file and line
        if not isinstance(error, MemoryError) and "can't allocate memory" not in text:
            raise
        print(
            f"error: not enough memory ({text or 'Python has none left'}); take smaller images, a "
            "smaller model, or fewer images at once",
            file=sys.stderr,
        )
        return 2


def _printable_warning(*args: Any, **kwargs: Any) -> str:
    """Return a printable warning; like errors, it may contain untrusted names."""
    return printable(_format_warning(*args, **kwargs), keep="\n\t")


def _come_to_the_end() -> None:
    """Ignore SIGTERM while a rank exits: launchers send it as soon as another rank has ended."""
    if "RANK" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
