"""The scheme that the algorithms' README shows, as a module of another package."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pospre import trust
from tests.algorithms.composition import README

NAME = "mylab.spiral:Spiral"


@pytest.fixture
def spiral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write ``mylab/spiral.py`` as the README has it, trust it, and return its address."""
    _, code = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "spiral.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trust, "_trusted", {"mylab"})
    yield NAME
    forget()


def forget() -> None:
    """Be as a process that has not imported the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
        del sys.modules[name]
