"""A seeded short run of a demo recipe stays in its band; one with a mistake leaves it."""

from pathlib import Path

import pytest

from pospre.reporting.reference_curves import read_reference
from tests.benchmarks.reference_curves import (
    MASKS,
    REFERENCES,
    SEEDS,
    STEPS,
    beside,
    render,
    short_run,
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    render(folder)
    return folder


def outside(name: str, work: Path, *changes: str) -> int:
    checks = beside(name, short_run(name, work / "scenes", work, SEEDS[0], *changes))
    return sum(not check.is_inside for check in checks)


@pytest.mark.parametrize("name", MASKS)
def test_a_seeded_run_stays_in_the_band(name: str, work: Path) -> None:
    assert read_reference(REFERENCES / f"{name}.json").edges[-1] == STEPS
    assert outside(name, work) == 0


@pytest.mark.parametrize("mistake", ["optimizer.base_lr=4e-2", MASKS["mae"]])
def test_a_mistake_does_not(work: Path, mistake: str) -> None:
    assert outside("mae", work, mistake) > 0
