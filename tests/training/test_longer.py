"""Another length for a run that is there: longer after its end, and never shorter than it is."""

import shutil
from pathlib import Path

import pytest
import yaml

from pospre.reporting.page import write_report
from tests.training.tiny_runs import Run, curve

MEASURED = "evaluation={position_grid: {num_samples: 8, baseline: false}}"


def rates(folder: Path) -> list[float]:
    return [rate for _, _, rate in curve(folder)]


def test_a_finished_run_is_made_longer(
    tiny: Path, run: Run, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    folder = tmp_path / "runs" / "tiny"
    assert run(tiny, MEASURED, "trainer.max_duration=6ba")[0] == 0
    measured = (folder / "evaluation" / "position_grid.json").read_text()
    code, said = run(tiny, MEASURED, "trainer.max_duration=3ep")
    assert code == 0 and f"resuming from {folder}/checkpoints/ep1-ba6" in said
    assert (
        "trainer.max_duration was 6ba, is 3ep: from step 7 on all schedules are those of 9" in said
    )
    assert "it would have been 0" in said
    assert not [one for one in recwarn if "No batches were trained" in str(one.message)]
    # the rates are those of the new length from the first new step on
    assert run(tiny, "trainer.max_duration=3ep", "run_name=whole")[0] == 0
    assert rates(folder)[6:] == rates(tmp_path / "runs" / "whole")[6:]
    assert f"{rates(folder)[6]:.3g}" in said
    assert [step for step, _, _ in curve(folder)] == list(range(1, 10))
    # and so is the rest of the run folder
    assert (folder / "evaluation" / "position_grid.json").read_text() != measured
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["trainer"]["max_duration"] == "3ep"
    assert "of 3" in write_report(folder).read_text()
    code, said = run(tiny, MEASURED, "trainer.max_duration=9ba")
    assert code == 0 and "already finished" in said and "schedules" not in said


def test_a_run_is_never_shorter_than_it_is(tiny: Path, run: Run, tmp_path: Path) -> None:
    assert run(tiny, "trainer.max_duration=2ep")[0] == 0
    before = (tmp_path / "runs" / "tiny" / "recipe.yaml").read_text()
    for other in ("5ba", "1ep"):
        code, said = run(tiny, f"trainer.max_duration={other}")
        assert code == 2 and f"trainer.max_duration = {other}" in said
        assert "is trained for 6; give at least 6ba, or choose another run_name" in said
        assert (tmp_path / "runs" / "tiny" / "recipe.yaml").read_text() == before


def test_an_unfinished_run_gets_another_length(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    assert run(tiny)[0] == 0
    for name in ("ep3-ba9", "ep4-ba12"):
        shutil.rmtree(folder / "checkpoints" / name)
    code, said = run(tiny, "trainer.max_duration=3ep")
    assert code == 0 and "was 4ep, is 3ep: from step 7 on all schedules are those of 9" in said
    assert run(tiny, "trainer.max_duration=3ep", "run_name=whole")[0] == 0
    assert rates(folder)[6:] == rates(tmp_path / "runs" / "whole")[6:]


def test_the_start_is_a_line_of_the_data_and_one_of_the_run(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    code, said = run(tiny, "trainer.max_duration=2ba", "schedule.warmup=1ba")
    assert code == 0
    data, line = said.splitlines()[:2]
    assert data == f"data: 24 samples of {tmp_path}/images; 2 classes: cat (12), dog (12)"
    for words in (
        "tiny: vit_tiny16 with droppos, ",
        "M parameters, on cpu in fp32; 24 images, 2 steps of 8, into ",
        f"{tmp_path}/runs/tiny. Ctrl-C saves and stops; the same command resumes",
    ):
        assert words in line
    assert "tables" not in said and "of memory" not in said
