"""Loggers beside ``metrics.jsonl``: each gets every line of that file, and nothing else."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pospre.training import loggers
from tests.training.tiny_runs import Run, metrics

Values = dict[str, dict[int, Any]]

MEASURED = "evaluation={knn: {every: 3ep, k: 3, baseline: false}}"
OPTIONS = ("trainer.log_interval=4", "trainer.save_interval=1ep", "trainer.clip_grad=null")


def logged(folder: Path) -> Values:
    """Return what the file of metrics holds for other loggers: values by name and step."""
    values: Values = {}
    for line in metrics(folder):
        for name in line.keys() - {"step", "time"}:
            values.setdefault(name, {})[line["step"]] = pytest.approx(line[name], rel=1e-6)
    return values


def test_tensorboard_has_every_line_once_in_one_file_per_start(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    for starts, length in ((1, "2ep"), (2, "4ep")):
        run(tiny, *OPTIONS, MEASURED, "loggers.tensorboard={}", f"trainer.max_duration={length}")
        assert len([*(folder / "tensorboard").rglob("events*")]) == starts
        for path in [*(folder / "checkpoints").glob("*-ba6")]:  # as if killed after step 6
            shutil.rmtree(path)
    events = EventAccumulator(str(folder / "tensorboard" / "tiny")).Reload()
    values = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert {name: dict(found) for name, found in values.items()} == logged(folder)
    assert {"lr", "throughput", "memory", "samples", "loss/droppos"} <= set(values)
    assert [step for step, _ in values["lr"]] == [1, 4, 8, 12]
    assert [step for step, _ in values["evaluation/knn/top1"]] == [9, 12]


def test_a_continued_mlflow_run_gets_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [SimpleNamespace(key="loss/total", step=8), SimpleNamespace(key="lr", step=4)]
    found = SimpleNamespace(data=SimpleNamespace(_metric_objs=before))
    given: Values = {}

    def log_metrics(metrics: dict[str, Any], step: int, **options: Any) -> None:
        for name, value in metrics.items():
            given.setdefault(name, {})[step] = value

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_metrics=log_metrics))
    logger = loggers.MLflow.__new__(loggers.MLflow)  # without a server
    vars(logger).update(_enabled=True, _run_id="1", synchronous=True, _metrics_cache={})
    vars(logger).update(ignore_metrics=[], rename_metrics={"total": "loss/total"})
    vars(logger).update(_mlflow_client=SimpleNamespace(get_run=lambda run: found))
    logger.fit_start(State.__new__(State), Logger.__new__(Logger))
    for step in range(5, 11):
        logger.log_metrics({"total": float(step), "lr": step / 2}, step)
    assert [*given["loss/total"]] == [9, 10] and [*given["lr"]] == [*range(5, 11)]


class Tracker(LoggerDestination):
    """Stands for a logger of Composer's: notes what it is given."""

    seen: tuple["Tracker", ...] = ()

    def __init__(self, project: str, tags: list[str] | None = None) -> None:
        self.project, self.tags = project, tags
        self.events: list[str] = []
        self.values: Values = {}
        Tracker.seen = (self,)

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        if self.project == "refused" and event.value == "init":
            raise RuntimeError("no such project")
        self.events.append(event.value)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        for name, value in metrics.items():
            self.values.setdefault(name, {})[step] = value

    def close(self, state: Any, logger: Any) -> None:
        self.events.append("close")


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = loggers._Kind(Tracker, "json", "json")
    monkeypatch.setitem(loggers._KINDS, "wandb", kind)


def test_a_logger_gets_arguments_events_and_lines(
    tracker: None, tiny: Path, run: Run, tmp_path: Path
) -> None:
    code, said = run(tiny, *OPTIONS, "loggers={wandb: {project: p, tags: [a, b]}}")
    assert code == 0, said
    (made,) = Tracker.seen
    assert (made.project, made.tags) == ("p", ["a", "b"])
    assert made.events[0] == "init" and made.events[-2:] == ["fit_end", "close"]
    assert made.values == logged(tmp_path / "runs" / "tiny")


def test_a_logger_that_cannot_start_ends_the_run(
    tracker: None, tiny: Path, run: Run, tmp_path: Path
) -> None:
    code, said = run(tiny, "loggers={wandb: {project: refused}}")
    assert code == 2 and "error: loggers.wandb cannot start: no such project" in said
    assert "Traceback" not in said and not (tmp_path / "runs/tiny/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "key", "environment"),
    [
        ("{wandb: {project: p, init_kwargs: {settings: {api_key: k3y}}}}",
         "loggers.wandb.init_kwargs.settings.api_key", "WANDB_API_KEY"),
        ("{neptune: {api_token: k3y}}", "loggers.neptune.api_token", "NEPTUNE_API_TOKEN"),
        ("{comet: {exp_kwargs: {apiKey: k3y}}}", "loggers.comet.exp_kwargs.apiKey", "COMET_API"),
        ("{mlflow: {tracking_uri: 'https://me:k3y@host/path'}}", "loggers.mlflow.tracking_uri",
         "MLFLOW_TRACKING_PASSWORD"),
    ],
)  # fmt: skip
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(
    override: str, key: str, environment: str, tiny: Path, run: Run, tmp_path: Path
) -> None:
    for option in ((), ("--resolve",)):
        code, said = run(tiny, f"loggers={override}", *option)
        assert code == 2 and f"{key} holds a secret" in said and environment in said
        assert "k3y" not in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "comet", "neptune"])
def test_a_missing_package_is_said_before_anything_is_written(
    name: str, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    code, said = run(tiny, f"loggers.{name}={{}}")
    assert code == 2 and f"loggers.{name} needs the package {name}" in said
    assert "pip install '" in said
    assert not (tmp_path / "runs").exists()
