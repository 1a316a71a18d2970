"""FSDP2, whole and in copies, and DDP on gloo ranks are the unwrapped model."""

import os
from pathlib import Path

import pytest

from pospre.model.algorithm import algorithm_names
from tests.algorithms.cases import HOST_OF
from tests.processes import finished, launcher

TOGETHER = (
    "mae+droppos",
    "droppos+lut",
    "ijepa+stop+crop_field",
    "dinov2+crop_field+masked_position",
)
OVER_SCHEMES = (  # on FSDP2 alone; rotary_mixed is that of the compiled step
    "simmim@learned_sincos",
    "droppos@learned_rotary",
    "mae@alibi",
    "mp3@lookhere",
    "mp3@relative",
    "stop@shared_relative",
)
OTHERS = [name for name in algorithm_names() if name not in "+".join(TOGETHER).split("+")]
CASES = (*("+".join((*HOST_OF.get(name, ()), name)) for name in OTHERS), *TOGETHER)
"""Every algorithm, beside others where it can be."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "cases", "shapes"),
    [(2, (*CASES, *OVER_SCHEMES), ("2", "DDP")), (4, TOGETHER, ("2x2",))],
    ids=["two", "four"],
)
def test_several_ranks_equal_one_process(
    ranks: int, cases: tuple[str, ...], shapes: tuple[str, ...]
) -> None:
    script = Path(__file__).with_name("sharded_step.py")
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    done = finished([*launcher(ranks), str(script), *cases], limit=600, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    more = ("centering", "KoLeo alone", "compiled") if ranks == 2 else ()
    for case in (*cases, *more):
        for shape in shapes[:1] if "@" in case else shapes:
            assert f"{case} on {shape}: loss" in done.stdout
