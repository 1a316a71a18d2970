"""The locks that pip installs from: the pins of the requirements, and a hash of each file."""

import re
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==([^\s;]+)(.*)$", re.M)


def pins(path: Path) -> dict[str, str]:
    return {canonicalize_name(m[1]): m[2] for m in PIN.finditer(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("requirements", "lock", "brought"),
    [
        ("requirements.txt", "requirements", r"nvidia-.*|triton|colorama|pywin32"),
        ("tests/benchmarks/requirements.txt", "bench", ""),
    ],
)
def test_a_lock_has_the_pins_and_hashes(requirements: str, lock: str, brought: str) -> None:
    path = ROOT / ".setup" / f"{lock}.lock"
    wanted, locked = pins(ROOT / requirements), pins(path)
    assert {name: locked.get(name) for name in wanted} == wanted
    # what torch pins itself on Linux, and what Windows would need
    others = {name for name in locked if name not in wanted}
    assert all(re.fullmatch(brought, name) for name in others), others
    text = path.read_text(encoding="utf-8")
    entries = re.split(r"^(?=\w)", text, flags=re.M)[1:]
    assert len(entries) == len(locked)
    for each in entries:
        head, *hashes = each.splitlines()
        assert head.endswith(" \\") and hashes, head
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes)
        is_foreign = canonicalize_name(PIN.match(head)[1]) in others  # type: ignore[index]
        assert ("sys_platform" in head) == is_foreign, head
