"""The start is short: the loader imports nothing that it does not need."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEAVY = ("streaming", "transformers", "composer", "torchvision", "boto3", "ffcv", "cv2")
FIRST_BATCH = """
import sys
from pospre.data.loader import build_loader
from pospre.data.views.options import ViewGroup
views = [ViewGroup("global", 2, 32), ViewGroup("local", 2, 16, scale=(0.05, 0.4))]
next(iter(build_loader(sys.argv[1], views=views, batch_size=2, seed=0)))
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize("name", ["folder", "mds", "ffcv"])
def test_the_first_batch_needs_little(stored: Callable[[str], Path], name: str) -> None:
    command = [sys.executable, "-c", FIRST_BATCH, str(stored(name)), *HEAVY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == (["ffcv", "cv2"] if name == "ffcv" else [])
