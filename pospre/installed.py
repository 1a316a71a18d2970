"""Check that this Python has what every command needs, without importing anything else."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

# import names of the package's requirements (see pyproject.toml)
NEEDED = (
    "torch",
    "torchvision",
    "timm",
    "composer",
    "numpy",
    "numba",
    "simplejpeg",
    "crc32c",
    "PIL",
    "pydantic",
    "yaml",
    "safetensors",
    "jinja2",
    "markupsafe",
    "pygments",
    "tqdm",
    "psutil",
    "tifffile",
)


def check_installed() -> None:
    """End ``python -m MODULE`` with one message and code 2 if this Python lacks a package."""
    is_command = sys.argv[:1] == ["-m"]  # while Python searches for its module
    missing = [name for name in NEEDED if is_command and find_spec(name) is None]
    if not missing:
        return
    checkout = Path(__file__).parents[1]
    remedy = "install pospre's wheel again, with its dependencies"
    if (checkout / "Makefile").is_file():
        python = shlex.quote(str(checkout / ".venv" / "bin" / "python"))
        given = getattr(sys, "orig_argv", ["-m", "MODULE"])  # missing in older Python versions
        command = f"{python} {shlex.join(given[given.index('-m') :])}"
        remedy = f"use the one that `make setup` in {checkout} makes: {command}"
    named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    print(f"error: {sys.executable} lacks {named}; {remedy}", file=sys.stderr)
    sys.exit(2)
