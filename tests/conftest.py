"""Fixtures for all tests: one compute thread, small image folders, and real photographs."""

import atexit
import gc
import io
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from composer.core import Engine
from hypothesis import HealthCheck, settings
from PIL import Image
from torch._inductor import config as inductor
from torch.distributed.checkpoint.state_dict import _get_fqns

from tests.forks import find_composer_once

# No property is about time, which goes by whatever else the machine does; the rest stays as it is,
# also what hypothesis does in CI.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


LONG = """
    run/peers/test_many_nodes model/test_fsdp training/scale/test_compilation test_package
    certificate/test_certificate drills/test_s3_kills
    data_prep/distribute/test_cluster test_recipes algorithms/test_contracts test_papers
    training/test_train planning/test_step_costs planning/test_plan test_readme
    run/checkpoints/test_uploads run/checkpoints/test_rank_files algorithms/test_schemes
    training/test_start_weights_swin
"""
"""Files of half a minute and more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files: at the end, one would keep a process busy and the others idle."""
    ranks = {f"tests/{name}.py": rank for rank, name in enumerate(LONG.split())}
    items.sort(key=lambda item: ranks.get(item.nodeid.split("::")[0], len(ranks)))


def pytest_collection_finish() -> None:
    """Let the half a million objects that all imports made be: each look at them takes 0.3 s."""
    gc.collect()
    gc.freeze()


find_composer_once()
inductor.compile_threads = 1  # no pool of processes, each of which would import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: the test processes share two cores, and sums keep their order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def models_forgotten() -> Iterator[None]:
    """Let go of the models that a file's tests trained."""
    yield
    forget_models()


def forget_models() -> None:
    """Let go of the models that were trained, of which a process would hold 10 GB in the end.

    The cache of names of torch 2.7 keeps every model whose state was read, Composer what it would
    close when the process ends.
    """
    atexit.unregister(Engine._close)
    if hasattr(_get_fqns, "cache_clear"):  # torch 2.11 has none any more
        _get_fqns.cache_clear()
        gc.collect()


@pytest.fixture
def whole_graph() -> Iterator[Callable[..., Any]]:
    """Return ``torch.compile`` into one graph; what it compiled is forgotten after the test.

    Else the eighth model of a process would be one too many for the limit of recompilations.
    """
    yield partial(torch.compile, backend="eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
