"""The package as pip installs it: what is in the wheel, and that it works elsewhere without extras.

The wheel is built here and installed into an empty environment, beside links to what its own
requirements bring; nothing of the checkout is on its path.
"""

import contextlib
import importlib.metadata
import io
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pospre
from data_prep import convert
from tests.training.tiny_runs import environment

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("pospre", "data_prep")
EXTRAS = ("ffcv", "s3", "convert", "evaluate", "onnx", "hf", "speech", "float8", "peft")

RECIPE = """\
data: {path: %s, batch_size: 4, views: {view: {size: 32}}}
encoder: {name: vit_tiny16, depth: 1, image_size: 32}
algorithms: {mae: {decoder_dim: 16, decoder_depth: 1, decoder_heads: 2}, droppos: {weight: 0.05}}
schedule: {warmup: 1ba}
trainer: {max_duration: 2ba, precision: fp32, device: cpu, progress_bar: false}
evaluation: {position_grid: {data: %s}}
"""

# Where the package is, and a recipe of it that extends another one.
FIND = """
import pospre
from pospre.recipe.recipe import load_recipe

print(pospre.__file__, load_recipe("finetune/lut_vitl16").encoder.name)
"""

# What asks for an extra, and which.
ASK = """
import sys
from pathlib import Path
from data_prep.distribute.conversion import Settings, convert
from data_prep.sources.registry import open_source
from pospre.output import check_picture
from pospre.data.opening import open_reader
from pospre.data.views.decode_crops import _opencv
from pospre.errors import UserError
from pospre.object_store import Bucket

Path("clips").mkdir()
Path("clips/one.wav").touch()
Path("rows").mkdir()
Path("rows/one.parquet").touch()
Path("a.beton").touch()
images = Path(sys.argv[1])
for ask in (
    lambda: Bucket("s3://bucket/run"),
    lambda: open_reader("s3://bucket/photos"),
    lambda: open_reader("a.beton"),
    lambda: _opencv(),
    lambda: convert(images, "out", Settings(format="mds"), num_workers=0),
    lambda: open_source(Path("rows")),
    lambda: open_source(Path("clips")),
    lambda: check_picture("--picture", Path("picture.png")),
):
    try:
        ask()
    except UserError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    caches = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "yamls"):
        shutil.copytree(ROOT / name, source / name, ignore=caches, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-c", "from setuptools.build_meta import *; build_wheel('out')"]
    subprocess.run(build, cwd=source, check=True, capture_output=True)  # what pip asks for
    (built,) = (source / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what a bare install brings."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    options = ["--no-index", "--no-compile", str(wheel)]
    subprocess.run([*pip, *options], check=True, capture_output=True)
    here = Path(sysconfig.get_path("purelib"))
    for name in files_of_a_bare_install():
        (site / name).symlink_to(here / name)
    return python


@pytest.fixture
def run(python: Path, tmp_path: Path) -> Callable[..., str]:
    """Run the environment's Python in an empty folder; return what it printed."""
    folder = tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    def call(*arguments: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [python, *arguments], cwd=folder, env=variables, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return call


def test_the_wheel_holds_both_packages_and_their_data(wheel: Path) -> None:
    assert wheel.name == f"pospre-{pospre.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        about = file.read(f"pospre-{pospre.__version__}.dist-info/METADATA").decode()
        assert f"pospre-{pospre.__version__}.dist-info/licenses/LICENSE" in file.namelist()
    below = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    kinds = (".py", ".css", ".jinja", ".json", ".typed")
    wanted = {path.relative_to(ROOT).as_posix() for path in below if path.suffix in kinds}
    recipes = [path.relative_to(ROOT) for path in (ROOT / "yamls").rglob("*") if path.is_file()]
    wanted |= {f"pospre/{path.as_posix()}" for path in recipes}
    assert names == wanted and "pospre/reporting/page.css" in names
    fields = Parser().parsestr(about)
    assert fields["Requires-Python"] in (">=3.11,<3.14", "<3.14,>=3.11")
    assert set(fields.get_all("Provides-Extra") or []) == {*EXTRAS, "dev"}


def test_the_pins_are_within_the_ranges() -> None:
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)", text, re.M))
    ranges = PROJECT["dependencies"]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        ranges = [*ranges, *(requirements if extra != "peft" else [])]  # no test uses it
    for requirement in map(Requirement, ranges):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_streaming_is_only_needed_to_write_shards() -> None:
    """Its upper bounds on numpy and transformers do not bind those who only read."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "pospre").rglob("*.py")]
    assert texts and not any(
        re.search(r"^\s*(import|from) streaming", text, re.M) for text in texts
    )
    optional = PROJECT["optional-dependencies"]
    asking = [name for name in optional if "mosaicml-streaming" in " ".join(optional[name])]
    assert asking == ["convert"]


def test_it_trains_and_measures_from_another_folder(
    run: Callable[..., str], image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    images, stored = image_folder(), tmp_path / "stored"
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert.main([str(images), str(stored), "--format", "mds"]) == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % (images, stored))

    run("-m", "pospre.train", recipe)
    (folder,) = (tmp_path / "elsewhere/runs").iterdir()
    assert (folder / "evaluation/position_grid.json").exists()
    assert "<style>" in (folder / "report.html").read_text()
    found = run("-c", FIND)
    assert str(tmp_path.parent) in found and str(ROOT) not in found and "vitl16" in found


def test_what_needs_an_extra_says_how_it_is_installed(
    run: Callable[..., str], image_folder: Callable[..., Path]
) -> None:
    said = run("-c", ASK, image_folder()).splitlines()
    wanted = ["s3", "s3", "ffcv", "ffcv", "convert", "convert", "speech", "convert"]
    assert len(said) == len(wanted)
    for line, extra in zip(said, wanted, strict=True):
        *before, command = re.findall(r"`(.*?)`", line)
        assert bool(before) == (extra == "ffcv") and "make" not in line
        python, *options = shlex.split(command)
        assert python == sys.executable or Path(python).name == "python"
        assert options[:3] == ["-m", "pip", "install"], line
        brought = PROJECT["optional-dependencies"][extra]
        assert {*map(Requirement, options[3:])} == {*map(Requirement, brought)}


def files_of_a_bare_install() -> set[str]:
    """Return what lies in site-packages for the sake of the package's own requirements."""
    names, todo = set(), [Requirement(text) for text in PROJECT["dependencies"]]
    for requirement in todo:  # grows meanwhile
        name = canonicalize_name(requirement.name)
        if name in names and not requirement.extras:
            continue
        names.add(name)
        for brought in map(Requirement, importlib.metadata.requires(name) or ()):
            extras = requirement.extras or {""}
            if not brought.marker or any(brought.marker.evaluate({"extra": e}) for e in extras):
                todo.append(brought)
    files = [file for name in names for file in importlib.metadata.files(name) or ()]
    return {file.parts[0] for file in files} - {"..", "__pycache__"}
