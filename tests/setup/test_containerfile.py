"""The file for images, which nothing here builds: what it names exists, and is pinned."""

import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / ".setup/Containerfile").read_text("utf-8")
IGNORED = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)).splitlines()
STEPS = [(line.split()[0], line.split(maxsplit=1)[1]) for line in LINES if line.strip()]
COMMANDS = [
    shlex.split(command)
    for name, rest in STEPS
    if name == "RUN"
    for command in re.split(r"&&|;|\bthen\b", rest)
]


def arguments(name: str) -> list[str]:
    return [rest for step, rest in STEPS if step == name]


def test_its_instructions_are_known_and_it_never_becomes_root_again() -> None:
    assert {name for name, _ in STEPS} <= {
        *["ARG", "FROM", "RUN", "USER", "WORKDIR", "COPY", "ENV", "CMD"]
    }
    names = [name for name, _ in STEPS]
    assert arguments("USER") == ["pospre"]
    assert names.index("USER") < names.index("COPY")
    assert any(words[0] == "useradd" and words[-1] == "pospre" for words in COMMANDS)
    assert not re.search(r"password|secret|token|_key", TEXT, re.I)


def test_its_python_and_system_packages_are_those_of_set_up() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    (version,) = [rest[7:] for rest in arguments("ARG") if rest.startswith("PYTHON=")]
    assert version in workflow["jobs"]["ci"]["strategy"]["matrix"]["python"]
    assert arguments("FROM") == ["docker.io/library/python:${PYTHON}-slim-bookworm"]
    script = (ROOT / ".setup/venv.sh").read_text("utf-8")
    (needed,) = re.findall(r'system_packages="(.*)"', script)
    (install,) = [words for words in COMMANDS if words[:2] == ["apt-get", "install"]]
    # the image's Python brings its own headers
    assert {*install[4:]} == {*needed.split()} - {"python3-dev"} | {"make"}


def test_its_files_and_targets_exist_and_requirements_come_first() -> None:
    copied = [rest.split()[1:-1] for rest in arguments("COPY")]
    assert copied == [["Makefile", "requirements.txt"], [".setup"], ["."]]
    assert all((ROOT / name).exists() for names in copied for name in names)
    names = [name for name, _ in STEPS]
    assert names[-5:] == ["COPY", "RUN", "COPY", "ENV", "CMD"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    made = [words[1] for words in COMMANDS if words[:1] == ["make"]]
    assert made == ["setup"] and {*made, yaml.safe_load(arguments("CMD")[0])[1]} <= {*targets}
    scripts = [words[0] for words in COMMANDS if words and words[0].startswith(".setup/")]
    assert scripts == [".setup/cpu_torch.sh"] and (ROOT / scripts[0]).stat().st_mode & 0o111
    assert {*re.findall(r"-f (\S+)", TEXT)} == {".setup/Containerfile"}
    assert {*re.findall(r"--build-arg (\w+)=", TEXT)} < {
        rest.partition("=")[0] for rest in arguments("ARG")
    }


def test_no_image_needs_what_docker_leaves_out() -> None:
    left_out = [line for line in IGNORED if not line.startswith("#")]
    assert {".git", ".venv*", "runs", "data"} <= {*left_out}
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()}
    for line in left_out:
        assert not (ROOT / line).exists() or line in {".git", ".setup/Containerfile", *ignored}
