"""The scripts behind make, run in a copy where python, uv and the compiler are stand-ins."""

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
# Notes its calls and refuses packages as pip does.
UV = """\
#!/usr/bin/env bash
python=$(dirname "$0")/python
echo "uv $*" >>"$python.calls"
! grep -f "$python.refuses" "${@: -1}"
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A project of scripts and stand-ins, with FFCV among its requirements."""
    shutil.copytree(ROOT / ".setup", tmp_path / ".setup")
    programs = {".venv/bin/python": PYTHON, ".venv/bin/uv": UV, "bin/pkg-config": "", "bin/c++": ""}
    for name, text in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text or "#!/bin/sh\n")
        program.chmod(0o755)
    (tmp_path / ".venv/bin/python.refuses").write_text("^ffcv==\n")
    pin(tmp_path, numpy="1", ffcv="2", setuptools="3")
    for name, text in {"txt": "torch==2.7\n", "lock": entry("torch", "2.7")}.items():
        (tmp_path / f".setup/torch2.7.{name}").write_text(text)
    return tmp_path


def pin(copy: Path, **pins: str) -> None:
    """Write pins into requirements.txt and, each with a hash, into its lock."""
    (copy / "requirements.txt").write_text("".join(f"{n}=={v}  # why\n" for n, v in pins.items()))
    lock = "# made by uv\n" + "".join(entry(name, version) for name, version in pins.items())
    (copy / ".setup/requirements.lock").write_text(lock)


def entry(name: str, version: str) -> str:
    return f"{name}=={version} ; python_version < '3.14' \\\n    --hash=sha256:{name}\n"


def run(
    copy: Path, script: str, *arguments: str, stdin: int = subprocess.DEVNULL, **variables: str
) -> str:
    """Run a script; return what it said, its exit code and the calls of python it made."""
    calls = copy / ".venv/bin/python.calls"
    calls.write_text("")
    search = f"{copy / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "TMPDIR": str(copy), "CI": "1"} | variables
    command = [str(copy / ".setup" / script), *arguments]
    done = subprocess.run(command, env=environment, stdin=stdin, capture_output=True, text=True)
    return f"{done.stdout}{done.stderr}exit {done.returncode}\n{calls.read_text()}"


def test_setup_goes_on_without_an_ffcv_that_cannot_be_built(copy: Path) -> None:
    said = run(copy, "venv.sh")
    assert said.count("uv pip install --python") == said.count("-r .venv/first.txt") == 2
    installs = said.count("-m pip install"), said.count("--require-hashes"), said.count("--no-deps")
    assert installs == (3, 5, 5)
    assert "exit 0" in said
    assert "without FFCV" in said and ".venv/ffcv.log says why" in said
    pins = (copy / ".venv/requirements.txt").read_text()
    assert pins == "# made by uv\n" + entry("numpy", "1") + entry("setuptools", "3")
    assert (copy / ".venv/first.txt").read_text() == entry("setuptools", "3")
    assert not [*copy.glob("pospre-setup*")]
    assert (copy / ".venv/.installed").read_text().startswith("Python 3.11.0 ffcv=failed ")

    again = run(copy, "venv.sh")  # nothing changed: not tried again
    assert "-m pip install" not in again and "without .beton" in again and "exit 0" in again

    pin(copy, numpy="1", ffcv="3", setuptools="3")
    (copy / ".venv/bin/python.refuses").write_text("^ffcv==2\n")
    changed = run(copy, "venv.sh")
    assert changed.count("-m pip install") == 1 and changed.count("uv pip install --python") == 1
    assert "with FFCV" in changed
    assert "ffcv=yes" in (copy / ".venv/.installed").read_text()
    assert "setup:" not in run(copy, "venv.sh")
    lock = copy / ".setup/requirements.lock"
    lock.write_text(lock.read_text() + "    --hash=sha256:ab\n")  # of another file of a pin
    assert run(copy, "venv.sh").count("uv pip install --python") == 1


def test_setup_uses_pip_where_uv_fails(copy: Path) -> None:
    """For example where pip.conf names a mirror."""
    (copy / ".venv/bin/uv").write_text("#!/bin/sh\nexit 2\n")
    (copy / ".venv/bin/python.refuses").write_text("^nothing==\n")
    said = run(copy, "venv.sh")
    assert "-m pip install" in said and "-r .venv/requirements.txt" in said
    assert "exit 0" in said and "with FFCV" in said


def test_setup_takes_no_pin_without_a_hash(copy: Path) -> None:
    (copy / "requirements.txt").write_text("NumPy==1\nffcv==3\nhypo_thesis[x]==4\n")
    said = run(copy, "venv.sh")
    assert "requirements.lock lacks ffcv==3 hypo-thesis==4; make it again as" in said
    assert "exit 2" in said and "-m pip install" not in said


def test_setup_asks_before_it_installs_system_packages(copy: Path) -> None:
    for name, text in {
        "pkg-config": "exit 1",
        "id": "echo ${IS:-0}",
        "sudo": 'shift; exec "$@"',
        "apt-get": 'echo "$*" >>"$0.calls"',
    }.items():
        (copy / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (copy / "bin" / name).chmod(0o755)
    called = copy / "bin/apt-get.calls"
    for key, value in {"IS": "1000", "FFCV": "no"}.items():  # without a terminal
        said = run(copy, "venv.sh", stdin=subprocess.DEVNULL, **{"CI": "", key: value})
        assert "sudo apt-get install pkg-config g++" in said and "exit 0" in said
        (copy / ".venv/.installed").unlink()
    ours, terminal = os.openpty()
    for answer in ("n", "y"):
        assert not called.exists()
        (copy / ".venv/.installed").unlink(missing_ok=True)
        os.write(ours, f"{answer}\n".encode())
        said = run(copy, "venv.sh", CI="", stdin=terminal)
        assert "FFCV needs pkg-config" in said and "as root? [y/N]" in said
    os.close(terminal)
    assert called.read_text().splitlines()[0] == "update"
    called.unlink()
    for ci in ("1", ""):  # in CI, and as root without a terminal
        (copy / ".venv/.installed").unlink()
        said = run(copy, "venv.sh", CI=ci)
        assert "apt-get install for FFCV (pkg-config g++" in said
        assert "install -y --no-install-recommends pkg-config" in called.read_text()
        called.unlink()


def test_setup_writes_through_no_link_that_was_laid(copy: Path) -> None:
    """Names of processes can be guessed, and so could that of its log."""
    target = copy / "target"
    target.write_text("kept")
    (copy / ".venv/bin/python.refuses").write_text("^numpy==\n")
    laid = f"for n in $(seq $$ $(($$ + 50))); do ln -s {target} {copy}/pospre-setup-$n.log; done"
    environment = {**os.environ, "PATH": f"{copy / 'bin'}:{os.environ['PATH']}", "CI": "1"}
    script = f"{laid}; exec {copy}/.setup/venv.sh"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**environment, "TMPDIR": str(copy)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and target.read_text() == "kept"
    (log,) = copy.glob("pospre-setup.*")
    assert log.stat().st_mode & 0o777 == 0o600 and f"{log} says why" in done.stderr


def test_setup_fails_when_something_else_cannot_be_installed(copy: Path) -> None:
    (copy / ".venv/bin/python.refuses").write_text("^numpy==\n")
    said = run(copy, "venv.sh")
    assert "requirements.txt could not be installed" in said and "exit 2" in said
    assert not (copy / ".venv/.installed").exists()


def test_the_oldest_torch_is_installed_on_request_and_kept(copy: Path) -> None:
    (copy / ".venv/bin/python.refuses").write_text("^nothing==\n")
    new = {"numpy": "1", "torch": "2.14", "torch-optimizer": "3", "nvidia-cudnn-cu13": "9"}
    pin(copy, **new, setuptools="3")
    installed, removed = copy / ".venv/requirements.txt", "-m pip uninstall --yes --quiet "
    assert removed not in run(copy, "venv.sh")
    whole = installed.read_text()
    said = run(copy, "venv.sh", TORCH="2.7")
    assert "exit 0" in said and f"{removed}nvidia-cudnn-cu13\n" in said
    kept = ("numpy", "1"), ("torch-optimizer", "3"), ("setuptools", "3"), ("torch", "2.7")
    assert installed.read_text() == "# made by uv\n" + "".join(entry(*each) for each in kept)
    assert "setup:" not in run(copy, "venv.sh") and "setup:" not in run(
        copy, "venv.sh", TORCH="2.7"
    )
    said = run(copy, "venv.sh", TORCH="2.8")
    assert "error: TORCH=2.8: .setup has a lock for TORCH=2.7" in said and "exit 2" in said
    assert "setup:" not in run(copy, "venv.sh")
    assert "exit 0" in run(copy, "venv.sh", TORCH="newest") and installed.read_text() == whole
    assert "setup:" not in run(copy, "venv.sh")


@pytest.mark.parametrize("kind", ["newest", "oldest"])
def test_other_versions_are_installed_beside_the_other_pins(copy: Path, kind: str) -> None:
    pins = copy / ".venv/requirements.txt"
    names = ("torch", "torch-optimizer", "numpy", "nvidia-nccl-cu13", "cuda-toolkit", "setuptools")
    pins.write_text("".join(entry(name, "1") for name in names))
    said = run(copy, "beside.sh", kind)
    assert "exit 0" in said and f"-m venv .venv-{kind}" in said
    other = entry("torch", "2.7") if kind == "oldest" else ""
    wanted = "".join(entry(name, "1") for name in (names[1], names[2], names[5])) + other
    assert (copy / f".venv-{kind}/pins.txt").read_text() == wanted
    installs = (copy / f".venv-{kind}/bin/python.calls").read_text().splitlines()
    installs = [line for line in installs if "pip install" in line]
    assert all("--require-hashes" in line and "--no-deps -r" in line for line in installs[:2])
    assert installs[1].endswith(f".venv-{kind}/pins.txt")
    newest = ["--upgrade torch torchvision timm"]
    assert [line[-len(newest[0]) :] for line in installs[2:]] == newest * (kind == "newest")
    assert f"{kind}:" not in run(copy, "beside.sh", kind)  # nothing to do

    pins.write_text(entry("numpy", "1") + entry("ffcv", "2"))
    refused = run(copy, "beside.sh", kind)
    assert "error: pip could not install" in refused and "exit 2" in refused
    assert not (copy / f".venv-{kind}/requirements.txt").exists()


def test_torch_for_cpus_replaces_the_build_with_nvidias_libraries(copy: Path) -> None:
    names = (
        "torch",
        "torch-optimizer",
        "torchvision",
        "nvidia-nccl-cu13",
        "cuda-toolkit",
        "triton",
    )
    pin(copy, **dict.fromkeys(names, "2"))
    said = run(copy, "cpu_torch.sh")
    assert "exit 0" in said
    install, uninstall = (copy / ".venv/bin/python.calls").read_text().splitlines()
    assert install.endswith(
        "--index-url https://download.pytorch.org/whl/cpu torch==2 torchvision==2"
    )
    assert uninstall == "-m pip uninstall --yes --quiet cuda-toolkit nvidia-nccl-cu13 triton"


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
    for probe in ("logistic", "knn"):
        assert (
            f"{probe} --model runs/{name}_mae --data out/{name}/val bank=out/{name}/train" in said
        )


def test_what_is_trained_can_be_changed_for_first_light(copy: Path) -> None:
    (copy / ".venv/.installed").write_text("Python 3.11.0 ffcv=no\n")
    given = "trainer.precision=fp32", "trainer.max_duration=2ep"
    said = run(copy, "first_light.sh", "photos", "out", "mae.yaml", *given)
    assert "exit 0" in said and f"trainer.run_folder=runs {' '.join(given)}" in said
    assert "pospre.train trainer" not in said  # no recipe
    said = run(copy, "first_light.sh", "photos", "out", "mae.yaml", "run_name=x")
    assert "exit 2" in said and "error: run_name is set by this command" in said
