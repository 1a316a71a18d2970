"""Fixtures for all tests that need torch: one compute thread, a process group, models forgotten."""

import atexit
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Engine
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.distributed.checkpoint.state_dict import _get_fqns

from tests.forks import find_composer_once

find_composer_once()
inductor.compile_threads = 1  # no pool of processes, each of which would import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let every test draw the same numbers, in any order of tests and in any process."""
    torch.manual_seed(0)


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
    counters.clear()
    yield partial(torch.compile, backend="eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
