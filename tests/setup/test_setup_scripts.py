"""The scripts behind make, run in a copy where python, pip and the compiler are stand-ins."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Answers what the scripts ask; pip notes each call and fails while "$0.refuses" names a package.
PYTHON = """\
#!/usr/bin/env bash
echo "$*" >>"$0.calls"
case "$*" in
*Python.h*) echo "$0" ;;
-V) echo "Python 3.11.0" ;;
*"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "$0.refuses" "${@: -1}/bin" ;;
*"pip install"*.txt) ! grep -f "$0.refuses" "${@: -1}" ;;
esac
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A project of scripts and stand-ins, with FFCV among its requirements."""
    shutil.copytree(ROOT / ".setup", tmp_path / ".setup")
    programs = {".venv/bin/python": PYTHON, "bin/pkg-config": "", "bin/c++": ""}
    for name, text in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text or "#!/bin/sh\n")
        program.chmod(0o755)
    (tmp_path / ".venv/bin/python.refuses").write_text("^ffcv==\n")
    (tmp_path / "requirements.txt").write_text("numpy==1\nffcv==2\n")
    return tmp_path


def run(copy: Path, script: str, *arguments: str) -> str:
    """Run a script; return what it said, its exit code and the calls of python it made."""
    calls = copy / ".venv/bin/python.calls"
    calls.write_text("")
    search = f"{copy / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "TMPDIR": str(copy), "CI": "1"}
    command = [str(copy / ".setup" / script), *arguments]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return f"{done.stdout}{done.stderr}exit {done.returncode}\n{calls.read_text()}"


def test_setup_goes_on_without_an_ffcv_that_cannot_be_built(copy: Path) -> None:
    said = run(copy, "venv.sh")
    assert said.count("-m pip install") == 2 and "exit 0" in said
    assert "without FFCV" in said and ".venv/ffcv.log says why" in said
    assert (copy / ".venv/requirements.txt").read_text() == "numpy==1\n"
    assert (copy / ".venv/.installed").read_text().startswith("Python 3.11.0 ffcv=failed\n")

    again = run(copy, "venv.sh")  # nothing changed: not tried again
    assert "-m pip install" not in again and "without .beton" in again and "exit 0" in again

    (copy / "requirements.txt").write_text("numpy==1\nffcv==3\n")
    (copy / ".venv/bin/python.refuses").write_text("^ffcv==2\n")
    changed = run(copy, "venv.sh")
    assert changed.count("-m pip install") == 1 and "with FFCV" in changed
    assert "ffcv=yes" in (copy / ".venv/.installed").read_text()
    assert "setup:" not in run(copy, "venv.sh")


def test_setup_fails_when_something_else_cannot_be_installed(copy: Path) -> None:
    (copy / ".venv/bin/python.refuses").write_text("^numpy==\n")
    said = run(copy, "venv.sh")
    assert "error: pip could not install" in said and "exit 2" in said
    assert not (copy / ".venv/.installed").exists()


def test_the_newest_are_installed_beside_the_other_pins(copy: Path) -> None:
    pins = copy / ".venv/requirements.txt"
    pins.write_text("torch==2\ntorch-optimizer==3\nnumpy==1\ntimm==1\n")
    said = run(copy, "newest.sh")
    assert "exit 0" in said and "-m venv .venv-newest" in said
    assert (copy / ".venv-newest/others.txt").read_text() == "torch-optimizer==3\nnumpy==1\n"
    installs = (copy / ".venv-newest/bin/python.calls").read_text().splitlines()
    assert "--no-deps -r .venv-newest/others.txt" in installs[0]
    assert installs[1].endswith("--upgrade torch torchvision torchaudio timm")
    assert "newest:" not in run(copy, "newest.sh")  # nothing to do

    pins.write_text("numpy==1\nffcv==2\n")
    refused = run(copy, "newest.sh")
    assert "error: pip could not install" in refused and "exit 2" in refused
    assert not (copy / ".venv-newest/requirements.txt").exists()


@pytest.mark.parametrize(
    ("images", "name"),
    [
        ("photos", "photos"),
        ("2024 trip", "2024_trip"),
        ("Фото", "images________"),
        (".", "images."),
        ("_x", "images_x"),
    ],
)
def test_every_folder_gives_a_valid_run_name(copy: Path, images: str, name: str) -> None:
    (copy / ".venv/.installed").write_text("Python 3.11.0 ffcv=no\n")
    said = run(copy, "first_light.sh", images, "out", "mae.yaml")
    assert "exit 0" in said
    assert f"run_name={name}_mae data.path=out/{name}/train" in said


def test_what_is_trained_can_be_changed_for_first_light(copy: Path) -> None:
    (copy / ".venv/.installed").write_text("Python 3.11.0 ffcv=no\n")
    given = "trainer.precision=fp32", "trainer.max_duration=2ep"
    said = run(copy, "first_light.sh", "photos", "out", "mae.yaml", *given)
    assert "exit 0" in said and f"trainer.run_folder=runs {' '.join(given)}" in said
    assert "pospre.train trainer" not in said  # no recipe
    said = run(copy, "first_light.sh", "photos", "out", "mae.yaml", "run_name=x")
    assert "exit 2" in said and "error: run_name is set by this command" in said
