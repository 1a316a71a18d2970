"""A seeded short run of a demo recipe stays in its band; one with a mistake leaves it."""

from pathlib import Path

import pytest

from pospre.report.compare.reference import read_reference
from tests.benchmarks.reference_curves import (
    MASKS,
    RECIPES,
    REFERENCES,
    SEEDS,
    STEPS,
    beside,
    render,
    short_run,
)

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    render(folder)
    return folder


def outside(name: str, work: Path, *changes: str) -> int:
    checks = beside(name, short_run(name, work / "scenes", work, SEEDS[0], *changes))
    return sum(not check.is_inside for check in checks)


def test_every_demo_recipe_has_a_small_reference() -> None:
    assert sorted(path.stem for path in REFERENCES.glob("*.json")) == NAMES
    for path in REFERENCES.glob("*.json"):
        assert read_reference(path).edges[-1] == STEPS and path.stat().st_size < 4000
    assert {*NAMES} - {*MASKS} == {"supervised", "mae_channels"}


def test_a_seeded_run_stays_in_the_band(work: Path) -> None:
    assert outside("mae", work) == 0


@pytest.mark.parametrize("mistake", ["optimizer.base_lr=4e-2", MASKS["mae"]])
def test_a_mistake_does_not(work: Path, mistake: str) -> None:
    assert outside("mae", work, mistake) > 0
