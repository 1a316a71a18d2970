"""Make a folder of what a node without a network lacks to run pospre.

    make gpu-bundle FREEZE=node.txt
    make gpu-bundle FREEZE=node.txt ARGS="--extra evaluate --output bundle_a100"

FREEZE is what this prints on the node: python3 -V; python3 -m pip list --format=freeze
The folder gets the wheels that its Python (Linux, x86-64) needs beside these packages to train and
to evaluate, and install.py, which installs them there.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from data_prep.publish.atomic import replace_folder, writing
from pospre.errors import UserError, run_command, suggestion
from pospre.installed import NEEDED

ROOT = Path(__file__).parents[1]
COMMAND = "`python3 -V; python3 -m pip list --format=freeze`"
GLIBC = 28  # 2.28, which torch's own wheels need
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)),
    *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
]


@dataclass(frozen=True)
class Node:
    """What a node has: its Python ("3.12"), and the version of each package by its plain name."""

    python: str
    packages: dict[str, Version]


def read_node(path: Path) -> Node:
    """Read what the node has.

    Raises:
        UserError: the file cannot be read, or is another one.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"FREEZE={path} cannot be read ({error}); on the node: {COMMAND}") from None
    python, packages = "3.12", dict[str, Version]()
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        name, _, version = line.partition("==")
        if found := re.fullmatch(r"Python (\d+\.\d+).*", line):
            python = found[1]
        elif not re.fullmatch(r"[\w.-]+==\S+", line):
            raise UserError(f"FREEZE={path}: {line!r} is not NAME==VERSION; on the node: {COMMAND}")
        else:
            try:
                packages[canonicalize_name(name)] = Version(version)
            except InvalidVersion:  # a system's package: no bound could be compared with it
                continue
    if "torch" not in packages:
        raise UserError(
            f"FREEZE={path} has no torch==…, which the bundle does not hold: install PyTorch and "
            f"torchvision on the node, then there: {COMMAND}"
        )
    return Node(python, packages)


def requirements(extras: list[str], python: str) -> tuple[list[Requirement], list[Requirement]]:
    """Return what pospre needs: what must fit the node, and what is taken though it may not.

    The latter is Composer, whose upper bounds no newer node meets, and the extras.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    if f"{python}.0" not in Requirement(f"python{project['requires-python']}").specifier:
        raise UserError(
            f"FREEZE has Python {python}; pospre needs {project['requires-python']} on the node."
        )
    for extra in extras:
        if extra not in optional:
            raise UserError(f"--extra {extra} is unknown.{suggestion(extra, optional)}")
    needed = [Requirement(text) for text in project["dependencies"]]
    more = [Requirement(text) for extra in extras for text in optional[extra]]
    strict = [need for need in needed if need.name != "mosaicml"]
    return strict, [need for need in needed if need.name == "mosaicml"] + more


def keep_fitting(node: Node, wanted: list[Requirement]) -> Node:
    """Return the node without the packages that pospre does not take, and name these."""
    kept = dict(node.packages)
    for need in wanted:
        name = canonicalize_name(need.name)
        has = kept.get(name)
        if has is None or need.specifier.contains(has, prereleases=True):
            continue
        if name == "torch":
            raise UserError(f"FREEZE has torch {has}; pospre needs {need}: update it on the node.")
        del kept[name]
        print(f"bundle: the node's {name} {has} is not {need.specifier}; the bundle has its own")
    return Node(node.python, kept)


def resolve(
    node: Node, strict: list[Requirement], loose: list[Requirement], scratch: Path
) -> list[str]:
    """Return ``name==version`` of what the node lacks; the tests' versions where they fit.

    What the node has stays as it is. ``loose`` and its own needs are resolved last, without bounds
    on what is there.
    """
    stubs = scratch / "stubs"
    stubs.mkdir()
    for name, version in node.packages.items():
        _write_stub(stubs, name, version)
    pins = [f"{name}=={version}" for name, version in node.packages.items()]
    inputs = {"pins": pins, "strict": [*map(str, strict)], "loose": [*map(str, loose)]}
    for name, lines in inputs.items():
        (scratch / name).write_text("\n".join(lines))
    first = _compile(node, scratch, "strict", "--constraints", "pins", "--find-links", "stubs")
    there = {*node.packages, *(pin.partition("==")[0] for pin in first)}
    (scratch / "there").write_text("\n".join(there))
    both = {*first, *_compile(node, scratch, "loose", "--excludes", "there")}
    return sorted(pin for pin in both if pin.partition("==")[0] not in node.packages)


def _write_stub(folder: Path, name: str, version: Version) -> None:
    """Write a wheel without content, so that the resolver knows a version that no index has."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        inside = f"{stem}.dist-info"
        file.writestr(f"{inside}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n"
                      f"Version: {version}\n")  # fmt: skip
        file.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{inside}/RECORD", "")


def _compile(node: Node, scratch: Path, wanted: str, *options: str) -> list[str]:
    """Resolve; versions in requirements.txt are preferred, torchao's … only with the same torch."""
    pinned = (ROOT / "requirements.txt").read_text("utf-8")
    if f"torch=={node.packages['torch'].public} " not in pinned:
        pinned = re.sub("^torch.*", "", pinned, flags=re.M)
    (scratch / "found.txt").write_text(pinned, "utf-8")
    _uv(node, scratch, wanted, "--output-file", "found.txt", "--no-annotate", *options)
    return (scratch / "found.txt").read_text("utf-8").split()


def _uv(node: Node, scratch: Path, *options: str) -> None:
    """Resolve with uv, in a folder of its own so that this project's settings do not count."""
    command = [
        *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-header"),
        *("--python", sys.executable, "--no-python-downloads", "--python-version", node.python),
        *("--python-platform", f"x86_64-manylinux_2_{GLIBC}", "--only-binary", ":all:"),
    ]
    done = subprocess.run([*command, *options], cwd=scratch, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            "no wheels fit the packages in FREEZE, or the index does not answer. uv says:\n"
            f"{done.stderr.strip()}"
        )


def wheels_of(node: Node, pins: list[str], scratch: Path) -> list[dict[str, Any]]:
    """Return name, version and wheels (size, hash) of each package that is to be loaded."""
    (scratch / "lacking").write_text("\n".join(pins))
    lock = ("--no-deps", "--format", "pylock.toml", "--output-file", "pylock.toml")
    _uv(node, scratch, "lacking", *lock)
    return tomllib.loads((scratch / "pylock.toml").read_text("utf-8")).get("packages", [])


def check_room(node: Node, packages: list[dict[str, Any]], output: Path) -> None:
    """Print how large the bundle will be, and compare with the room on the disk."""
    size = sum(max(wheel.get("size", 0) for wheel in each["wheels"]) for each in packages)
    shown = f"{size / 1e6:.1f} MB" if size else "of a size that the index does not give"
    torch = node.packages["torch"]
    print(f"bundle: {len(packages)} wheels, {shown}, for Python {node.python} and torch {torch}",
          flush=True)  # fmt: skip
    free = shutil.disk_usage(output.parent).free
    if free < size:
        raise UserError(f"--output {output}: its disk has {free / 1e6:.1f} MB left; make room.")


def load(node: Node, packages: list[dict[str, Any]], folder: Path) -> None:
    """Load the wheels with pip, each checked by its hash.

    Raises:
        UserError: pip could not; it has said why.
    """
    lines = [
        f"{each['name']}=={each['version']}"
        + "".join(f" --hash=sha256:{wheel['hashes']['sha256']}" for wheel in each["wheels"])
        for each in packages
    ]
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(lines) + "\n", "utf-8")
    command = [
        *(sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(listed)),
        *("--python-version", node.python, "--implementation", "cp"),
        *(f"--platform={name}" for name in PLATFORMS),
    ]
    if subprocess.run([*command, "--dest", str(folder / "wheels")]).returncode:
        raise UserError("pip could not load the wheels, see above; an earlier bundle is unchanged.")


def make_bundle(freeze: Path, extras: list[str], output: Path) -> None:
    """Make the bundle; an earlier one is replaced once the new one is complete.

    Raises:
        UserError: a bad list of packages, no wheel that fits, no room, or another folder there.
    """
    node = read_node(freeze)
    strict, loose = requirements(extras, node.python)
    if output.exists() and not (output / "manifest.json").is_file():
        raise UserError(f"--output {output} is not a bundle; give another folder, or remove it.")
    node = keep_fitting(node, strict + loose)
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{output.name}.partial-"
        with TemporaryDirectory(prefix=prefix, dir=output.parent) as parent:
            scratch, folder = Path(parent), Path(parent, "new")
            folder.mkdir()
            packages = wheels_of(node, resolve(node, strict, loose, scratch), scratch)
            if not packages:
                print("bundle: the node has all that pospre needs; there is nothing to bundle")
                return
            check_room(node, packages, output)
            load(node, packages, folder)
            shutil.copy(ROOT / ".setup/install_bundle.py", folder / "install.py")
            manifest = {
                "Python": node.python,
                "torch": node.packages["torch"].public,
                "machine": "Linux x86_64",
                "requires": [*map(str, strict + loose)],
                "imports": NEEDED,
            }
            text = json.dumps(manifest, indent=1) + "\n"
            (folder / "manifest.json").write_text(text, "utf-8")
            replace_folder(folder, output)
    print(f"bundle: {output} is ready; on the node: python3 {output}/install.py FOLDER")


def main() -> int:
    """Read the command line and make the bundle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("freeze", type=Path, metavar="FREEZE", help="the node's packages")
    parser.add_argument("--extra", action="append", default=[], help="of pyproject.toml: evaluate")
    parser.add_argument("--output", type=Path, default=Path("bundle"), help="the folder to make")
    options = parser.parse_args()
    make_bundle(options.freeze, options.extra, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
