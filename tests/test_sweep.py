"""A grid of runs: which there are, what is done again, and the table of what came out."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pospre import sweep
from pospre.errors import run_command
from pospre.evaluation import sweep_runs
from pospre.train import main as train
from tests.refusals import refuses

Images = Callable[..., Path]

RECIPE = """\
data: {path: %s, batch_size: 4, views: {view: {size: 32}}}
encoder: {name: vit_tiny16, depth: 1, image_size: 32, patch_size: 16}
algorithms: {supervised: {}}
schedule: {warmup: 1ba}
trainer: {max_duration: 2ba, precision: fp32, device: cpu, progress_bar: false, run_folder: %s}
evaluation: {accuracy: {}}
"""


@pytest.fixture
def recipe(image_folder: Images, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE % (image_folder(), tmp_path / "runs"))
    return path


def test_a_grid_is_trained_once_and_summarised(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> int:
        """Train here: a process of its own would import everything anew."""
        commands.append(command)
        return run_command(lambda: train(command[3:]))

    monkeypatch.setattr(sweep, "_run", run)
    output = tmp_path / "sweep_runs.json"
    arguments = [str(recipe), "optimizer.base_lr=1e-2,1e-4", "optimizer.weight_decay=0.1"]
    assert sweep.main([*arguments, "--output", str(output)]) == 0
    names = ["tiny_base_lr1e-2", "tiny_base_lr1e-4"]
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == names
    summary = json.loads(output.read_text())
    assert [run["run_name"] for run in summary["runs"]] == names
    measured = [
        json.loads((tmp_path / "runs" / name / "evaluation/accuracy.json").read_text())["results"]
        for name in names
    ]
    top1 = summary["figures"]["accuracy/top1"]
    values = [results["top1"] for results in measured]
    assert (top1["best"], top1["mean"]) == (max(values), statistics.fmean(values))
    assert top1["deviation"] == pytest.approx(statistics.stdev(values))
    assert "deviation" in capsys.readouterr().out and len(commands) == 2
    assert sweep.main(arguments) == 0 and len(commands) == 2  # nothing is done again
    assert sweep.main([*arguments[:2], "optimizer.weight_decay=0.2"]) == 2  # another recipe
    assert "exists with another recipe" in capsys.readouterr().err and len(commands) == 3


def test_a_setting_has_mean_and_deviation_over_its_seeds() -> None:
    def run(rate: str, seed: str, top1: float) -> dict[str, Any]:
        values = {"optimizer.base_lr": rate, "seed": seed}
        return {"values": values, "run_name": rate + seed, "figures": {"knn/top1": top1}}

    runs = [run("a", "0", 0.25), run("b", "0", 0.5), run("a", "1", 0.75), run("b", "1", 0.5)]
    settings = sweep_runs._settings(runs)
    spread = {"mean": 0.5, "deviation": pytest.approx(0.125**0.5), "runs": 2}
    assert settings == [
        {"values": {"optimizer.base_lr": "a"}, "figures": {"knn/top1": spread}},
        {"values": {"optimizer.base_lr": "b"}, "figures": {"knn/top1": {**spread, "deviation": 0}}},
    ]
    said = sweep_runs.table({"runs": runs, "settings": settings, "figures": {}})
    assert "settings, over their seeds" in said and "0.3536" in said
    one_rate, no_seeds = (
        [each for each in runs if each["values"][key] == value]
        for key, value in (("optimizer.base_lr", "a"), ("seed", "0"))
    )
    for runs in (one_rate, no_seeds):  # the table of runs, or of figures, has it all
        settings = sweep_runs._settings(runs)
        said = sweep_runs.table({"runs": runs, "settings": settings, "figures": {}})
        assert "settings" not in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seed=1"], "needs a key with several values"),
        (["seed=1,1"], "repeats a value"),
        (["seed=1,2", "seed=3,4"], "seed is given twice"),
        (["seed=1,,2"], "has an empty value"),
        (["seed=1,2", "--launcher", "a 'b"], "--launcher is a 'b, not a valid command"),
        (["seed=1,2", "--output", "/dev/null/x.json"], "is not a writable folder"),
        (["seed"], "'seed' is not a setting"),
        (["optimizer.betas=[0.9, 0.95]"], "needs a key with several values"),
        (["optimizer.base_lr=1e-3,fast"], "optimizer.base_lr"),
        (["optimiser.lr=1,2"], "optimiser"),
        (["seed=1,2", "evaluation={}"], "it has none"),
        (["seed=1,2", "evaluation.accuracy.data=nowhere"], "nowhere does not exist"),
    ],
)
def test_what_is_no_grid_is_said_before_the_first_run(
    recipe: Path, tmp_path: Path, settings: list[str], message: str
) -> None:
    refuses(message, lambda: sweep.main([str(recipe), *settings]))
    assert not (tmp_path / "runs").exists()


def test_lists_are_values(recipe: Path) -> None:
    cells = sweep_runs.cells_of(
        str(recipe), ["optimizer.betas=[0.9, 0.95],[0.9, 0.999]", "seed=0,1"]
    )
    betas: list[Any] = [(cell.recipe.optimizer.betas, cell.recipe.seed) for cell in cells]
    assert betas == [((0.9, 0.95), 0), ((0.9, 0.95), 1), ((0.9, 0.999), 0), ((0.9, 0.999), 1)]
    assert len({cell.recipe.run_name for cell in cells}) == 4


def test_a_run_that_fails_or_cannot_start(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(recipe), "seed=0,1", "--launcher"]
    assert sweep.main([*arguments, "false"]) == 1
    assert "tiny_seed0 ended with exit code 1" in capsys.readouterr().err
    refuses("--launcher: nowhere cannot be run", lambda: sweep.main([*arguments, "nowhere"]))
