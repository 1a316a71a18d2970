"""FSDP2 on two gloo ranks is the unwrapped model."""

import os
import sys
from pathlib import Path

import pytest

from pospre.model.algorithm import algorithm_names
from tests.algorithms.cases import HOST_OF
from tests.processes import finished

TOGETHER = (
    "mae+droppos",
    "droppos+lut",
    "ijepa+stop+crop_field",
    "dinov2+crop_field+masked_position",
)
CASES = (*("+".join((*HOST_OF.get(name, ()), name)) for name in algorithm_names()), *TOGETHER)


@pytest.mark.timeout(900)
def test_two_ranks_equal_one_process():
    script = Path(__file__).with_name("two_ranks.py")
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "composer.cli.launcher", "-n", "2"]
    done = finished([*launcher, str(script), *CASES], limit=600, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for case in (*CASES, "KoLeo alone"):
        assert f"{case}: loss" in done.stdout
