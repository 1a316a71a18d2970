"""The start is short: the loader imports nothing that it does not need, reading still less."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HEAVY = ("streaming", "transformers", "composer", "torchvision", "boto3", "ffcv", "cv2")
FIRST_BATCHES = f"""
import sys
def loaded(*names):
    return [name for name in names if name in sys.modules]
from pospre.data.opening import open_reader
open_reader(sys.argv[2]).read(0)
assert not loaded("numba", *{HEAVY})
from pospre.data.loader import build_loader
from pospre.data.views.options import ViewGroup
views = [ViewGroup("global", 2, 32), ViewGroup("local", 2, 16, scale=(0.05, 0.4))]
for path in sys.argv[1:]:
    next(iter(build_loader(path, views=views, batch_size=2, seed=0)))
    print(*loaded(*{HEAVY}), sep=",")
"""


def test_the_first_batch_needs_little(stored: Callable[[str], Path]) -> None:
    paths = [str(stored(name)) for name in ("folder", "mds", "ffcv")]
    command = [sys.executable, "-c", FIRST_BATCHES, *paths]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("\n") == ["", "", "ffcv,cv2", ""]
