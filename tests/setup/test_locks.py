"""The locks that pip installs from: the pins of the requirements, and a hash of each file."""

import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==([^\s;]+)(.*)$", re.M)


def pins(path: Path) -> dict[str, str]:
    return {canonicalize_name(m[1]): m[2] for m in PIN.finditer(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("requirements", "lock"),
    [
        ("requirements.txt", "requirements"),
        (".setup/torch2.7.txt", "torch2.7"),
        ("tests/benchmarks/requirements.txt", "bench"),
    ],
)
def test_a_lock_has_the_pins_and_hashes(requirements: str, lock: str) -> None:
    path = ROOT / ".setup" / f"{lock}.lock"
    locked = pins(path)
    assert locked == pins(ROOT / requirements)
    text = path.read_text(encoding="utf-8")
    entries = re.split(r"^(?=\w)", text, flags=re.M)[1:]
    assert len(entries) == len(locked)
    for each in entries:
        head, *hashes = each.splitlines()
        assert head.endswith(" \\") and hashes, head
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes)
        is_for_linux = re.match("nvidia-|triton|cuda-", head) and lock != "bench"
        assert ("sys_platform == 'linux'" in head) == bool(is_for_linux), head


def test_the_first_line_of_the_requirements_installs_them(tmp_path: Path) -> None:
    """Each pin of this environment is taken as given, so Composer's bounds do not count."""
    wanted = pins(ROOT / "requirements.txt")
    if version("torch").partition("+")[0] != wanted["torch"]:
        pytest.skip("this environment has another torch on purpose")
    first, *others = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    has_ffcv = find_spec("ffcv") is not None
    lines = [line for line in others if has_ffcv or not re.match("ffcv|fastargs", line)]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    pip, *options = first.removeprefix("# ").split()
    assert pip == "pip" and "--no-deps" in options
    command = [sys.executable, "-m", "pip", *options, "--no-index", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Would install" not in done.stdout, done.stderr
    assert done.stdout.count("already satisfied") > 200
