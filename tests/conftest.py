"""For all tests: their order, their processes, small image folders, and real photographs."""

import gc
import io
import os
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

from tests.forks import SHARED, start

# No property is about time, which goes by whatever else the machine does; the rest stays as it is,
# also what hypothesis does in CI.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


LONG = """
    certificate/test_certificate training/test_stages run/peers/test_many_nodes model/test_fsdp
    training/test_adapt algorithms/test_composition test_package training/scale/test_compilation
    data_prep/distribute/test_cluster test_recipes algorithms/test_contracts test_papers
    benchmarks/test_gpu_count training/test_train planning/test_step_costs planning/test_plan
    algorithms/test_part training/callbacks/test_stop_signals planning/test_kernels
    training/test_evaluations_during_training test_readme run/checkpoints/test_uploads
    run/checkpoints/test_rank_files algorithms/test_schemes training/test_reference
    training/test_start_weights_swin training/test_fading_run
    model/test_trained_leaks nn/weights/test_dinov3 nn/weights/test_eva benchmarks/test_gpu_minutes
"""
"""Files of half a minute and more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files: at the end, one would keep a process busy and the others idle."""
    ranks = {f"tests/{name}.py": rank for rank, name in enumerate(LONG.split())}
    items.sort(key=lambda item: ranks.get(item.nodeid.split("::")[0], len(ranks)))


def pytest_collection_finish() -> None:
    """Let the half a million objects of all imports be, and look at new ones less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures that import torch, unless this process only hands tests out to others."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.torch_fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Let the processes that run tests be forks of one that has imported torch."""
    os.environ[SHARED] = start()
    for spec in specs:
        spec.python = f"{shlex.quote(sys.executable)} -m tests.forks"


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder of real data named by POSPRE_TEST_DATA; skip the test without it."""
    folder = os.environ.get("POSPRE_TEST_DATA", "")
    if not folder:
        pytest.skip("needs real photographs: set POSPRE_TEST_DATA to their folder")
    if not Path(folder).is_dir():
        pytest.fail(f"POSPRE_TEST_DATA={folder} is no folder")
    return Path(folder)


def draw_image(seed: int, width: int, height: int) -> Image.Image:
    """Return a smooth colourful picture (a JPEG keeps it nearly), different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@cache
def jpeg(seed: int, width: int, height: int) -> bytes:
    """Return such a picture as a JPEG, which hundreds of tests write anew."""
    file = io.BytesIO()
    draw_image(seed, width, height).save(file, "JPEG", quality=92)
    return file.getvalue()


def write_images(
    root: Path, count: int, classes: tuple[str, ...] = (), size: tuple[int, int] = (80, 60)
) -> Path:
    """Write JPEGs ``<class>/<number>.jpg`` in turn over the classes (none: flat) below ``root``."""
    for number in range(count):
        folder = root / classes[number % len(classes)] if classes else root
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04d}.jpg").write_bytes(jpeg(number, *size))
    return root


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return ``make(num_images=8, classes=("cat", "dog"), size=(80, 60), name="images")``.

    It writes JPEGs as ``write_images`` does, and returns their folder.
    """

    def make(
        num_images: int = 8,
        classes: tuple[str, ...] = ("cat", "dog"),
        size: tuple[int, int] = (80, 60),
        name: str = "images",
    ) -> Path:
        return write_images(tmp_path / name, num_images, classes, size)

    return make
