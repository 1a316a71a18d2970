"""Install this bundle on a node like the one that it was made for; no network or root is needed.

    python3 bundle/install.py FOLDER

The node's own packages stay as they are: those of the bundle go into FOLDER, for PYTHONPATH.
"""

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent


def fail(text: str) -> NoReturn:
    """End with a message and the code of a user's mistake."""
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def installed(name: str) -> str:
    """Return the version of a package, without its local part; "none" if it is not there."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def read_manifest() -> "dict[str, Any]":
    """Read what the bundle is for, and end if this is another node."""
    try:
        manifest = json.loads((HERE / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{HERE} is not a whole bundle ({error}); copy it again")
    here = {
        "Python": "{}.{}".format(*sys.version_info[:2]),
        "torch": installed("torch"),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if other := [key for key in here if here[key] != manifest[key]]:
        fail(
            f"{HERE} is for {' and '.join(f'{key} {manifest[key]}' for key in other)}; here: "
            f"{', '.join(here[key] for key in other)}. Start the right python3, or make a bundle "
            "of this node's packages"
        )
    return manifest


def install(folder: Path) -> None:
    """Install the wheels, checked by their hashes; an earlier bundle in the folder is replaced."""
    if folder.exists() and not (folder / "manifest.json").is_file():
        fail(f"{folder} exists and has no bundle; give a new folder")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # isolated: images set PIP_CONSTRAINT, which would refuse what is not theirs
    command = [
        *(sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-cache-dir"),
        *("--disable-pip-version-check", "--no-compile", "--no-index", "--no-deps"),
        *("--find-links", str(HERE / "wheels"), "--require-hashes"),
        *("--requirement", str(HERE / "requirements.txt"), "--target", str(partial)),
    ]
    if subprocess.run(command).returncode:
        shutil.rmtree(partial, ignore_errors=True)
        fail(f"pip could not install into {folder}, see above; nothing was changed")
    shutil.copy(HERE / "manifest.json", partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def print_bounds(folder: Path, requires: "list[str]") -> None:
    """Print each bound of pospre or of a bundled package that this node does not meet."""
    from packaging.requirements import Requirement

    asked = [("pospre", text) for text in requires]
    for each in sorted(distributions(path=[str(folder)]), key=lambda each: each.name):
        asked += [(f"{each.name} {each.version}", text) for text in each.requires or ()]
    for name, text in asked:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        has = installed(need.name)
        if has == "none" or not need.specifier.contains(has, prereleases=True):
            print(f"bundle: {name} is for {need.name} {need.specifier}; here: {has}")


def main() -> None:
    """Install, say what does not fit, and try each import."""
    parser = argparse.ArgumentParser(description="Install pospre's needs for a node's own torch.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder, for PYTHONPATH")
    folder = parser.parse_args().folder.resolve()
    manifest = read_manifest()
    install(folder)
    sys.path.insert(0, str(folder))
    print_bounds(folder, manifest["requires"])
    warnings.simplefilter("ignore")
    broken = []
    for name in manifest["imports"]:
        try:
            import_module(name)
        except Exception as error:  # whatever a library compiled for another version raises
            broken.append(f"{name} ({error})")
    if broken:
        fail(f"{folder} is installed, but these cannot be imported: {'; '.join(broken)}")
    print(f"bundle: {folder} is ready, all imports work. Now:")
    path = shlex.quote(str(folder))
    print(f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}} PATH={path}/bin:$PATH")


if __name__ == "__main__":
    main()
