"""The versions that wrote a checkpoint: stored in it and its manifest, compared on reading."""

import functools
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import composer
import torch
from composer.utils import dist

import pospre

_COMPARED = ("pospre", "revision", "torch", "composer", "python")


def versions() -> dict[str, str | int | None]:
    """Return the versions of this process, for a checkpoint that is about to be written.

    ``revision`` is the commit of the running checkout, with ``-dirty`` if tracked files differ,
    and None if pospre is installed as a package. ``world_size`` counts the ranks.
    """
    return {
        "pospre": pospre.__version__,
        "revision": revision(Path(pospre.__file__).parent),
        "torch": str(torch.__version__),
        "composer": composer.__version__,
        "python": platform.python_version(),
        "world_size": dist.get_world_size(),
    }


@functools.cache
def revision(package: Path) -> str | None:
    """Return the commit that a package's folder is checked out at, None outside of a checkout.

    A package in an environment within a checkout does not count.
    """
    commands = (
        ("ls-files", "--error-unmatch", "__init__.py"),
        ("rev-parse", "HEAD"),
        ("status", "--porcelain", "--untracked-files=no"),
    )
    try:
        _, commit, changes = (
            subprocess.run(
                ["git", "-C", str(package), *command],
                capture_output=True,
                text=True,
                check=True,
                timeout=20,
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit


def warn_of_other_versions(content: dict[str, Any], uri: str) -> None:
    """Warn if a checkpoint was written by other versions; other numbers of ranks are fine."""
    noted = content.get("versions")
    if not isinstance(noted, dict):
        return
    own = versions()
    differing = [
        f"{key} {str(noted.get(key))[:60]!r} (here {str(own[key])!r})"
        for key in _COMPARED
        if noted.get(key) != own[key]
    ]
    if differing:
        print(
            f"warning: {uri} was written with {', '.join(differing)}; what follows from it need "
            "not be the same to the last bit",
            file=sys.stderr,
            flush=True,
        )
