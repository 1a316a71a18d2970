"""Evaluations while training: what they measure, and that training does not notice."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer.utils import dist

from pospre import collectives, evaluate, train
from pospre.errors import UserError
from pospre.evaluation import during_training
from pospre.run.checkpoints.folders import NOTE
from pospre.run.checkpoints.reading import read_checkpoint
from tests.disk import snapshot
from tests.training.tiny_runs import Run, curve, metrics, write_tiny

DROPOUT = ("encoder.dropout=0.2", "encoder.drop_path=0.1", "schedule={warmup: 2ba, length: 12ba}")
OFTEN = "evaluation={knn: {every: 1ep, k: 3}, position_grid: {every: 5ba, num_samples: 8}}"
STEPS = {"knn": [3, 6, 9, 12], "position_grid": [5, 10, 12]}


def measured(folder: Path, name: str) -> dict[int, dict[str, float]]:
    """Return the figures of an evaluation by step; none may be there twice."""
    start, found = f"evaluation/{name}/", {}
    for line in metrics(folder):
        figures = {key.removeprefix(start): line[key] for key in line if key.startswith(start)}
        if figures:
            assert line["step"] not in found and figures.pop("seconds") >= 0
            found[line["step"]] = figures
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(str(folder / "checkpoints" / "ep4-ba12")).content["state"]["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with dropout that nothing is measured in."""
    folder = tmp_path_factory.mktemp("quiet")
    assert train.main([str(write_tiny(folder)), *DROPOUT, "run_name=quiet"]) == 0
    return folder / "runs" / "quiet"


def test_training_does_not_notice_and_checkpoints_measure_the_same(
    quiet: Path, tiny: Path, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "tiny"
    code, said = run(tiny, *DROPOUT, OFTEN, "loggers.tensorboard={}")
    assert code == 0, said
    trained = [line for line in metrics(folder) if "loss/total" in line]
    assert [(line["step"], line["loss/total"], line["lr"]) for line in trained] == curve(quiet)
    assert same(weights(folder), weights(quiet))

    for name, steps in STEPS.items():
        assert sorted(measured(folder, name)) == steps
    history = [json.loads(line) for line in (folder / "evaluation" / "history.jsonl").open()]
    assert [line["step"] for line in history if line["name"] == "knn"] == STEPS["knn"]
    by_step = {line["step"]: line["results"] for line in history if line["name"] == "knn"}
    assert {step: {"top1": by_step[step]["top1"]} for step in by_step} == measured(folder, "knn")
    # the untrained encoder, which does not change, is measured once: in the end
    assert by_step[3]["initial_top1"] is None and by_step[12]["initial_top1"] is not None
    newest = json.loads((folder / "evaluation" / "knn.json").read_text())
    assert newest == history[-2] and "\nposition_grid: " in said and "\nknn: " in said
    assert "knn · top1" in (folder / "report.html").read_text()

    images, saved = str(tmp_path / "images"), str(folder / "checkpoints" / "ep2-ba6")
    output = tmp_path / "knn.json"
    arguments = ["--model", saved, "--data", images, "--output", str(output), "k=3"]
    assert evaluate.main(["knn", *arguments]) == 0
    assert json.loads(output.read_text())["results"]["top1"] == by_step[6]["top1"]


def test_told_to_stop_while_measuring_it_goes_on_without_a_gap(
    quiet: Path, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, measure, seen = tmp_path / "runs" / "tiny", during_training.measure_checkpoint, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        seen.append(options["step"])
        if len(seen) == 3:  # the second of knn; the first of position_grid is between them
            os.kill(os.getpid(), signal.SIGTERM)
        document = measure(*arguments, **options)
        document["results"]["top1"] = options["step"] / 100  # the later the better
        return document

    monkeypatch.setattr(during_training, "measure_checkpoint", interrupted)
    options = (*DROPOUT, OFTEN, "trainer.keep_best=knn/top1")
    code, said = run(tiny, *options)
    assert code == 75 and "after step 6 of 12, saved in" in said
    assert sorted(measured(folder, "knn")) == [3]
    (saved,) = (folder / "checkpoints").glob("*-ba6")
    before = snapshot(saved)
    code, said = run(tiny, *options)
    assert code == 0 and "resuming from" in said
    assert snapshot(saved) == before  # it was the best one when training went on
    for name, steps in STEPS.items():
        assert sorted(measured(folder, name)) == steps
    trained = [line["loss/total"] for line in metrics(folder) if "loss/total" in line]
    assert trained == [loss for _, loss, _ in curve(quiet)]
    assert same(weights(folder), weights(quiet))


def test_killed_it_measures_nothing_twice_and_keeps_the_same_best(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    often = "evaluation={knn: {every: 2ba, k: 3, baseline: false}}"
    options = (often, "trainer.save_interval=2ba", "trainer.keep_best=knn/top1")
    assert run(tiny, *options)[0] == 0
    figures = measured(folder, "knn")
    assert sorted(figures) == [2, 4, 6, 8, 10, 12]
    best = max(figures, key=lambda step: (figures[step]["top1"], -step))
    assert json.loads((folder / "checkpoints" / "best" / NOTE).read_text())["step"] == best
    # as if killed while measuring step 6, the end of an epoch, which was saved before
    for step in (8, 10, 12):
        for path in [*(folder / "checkpoints").rglob(f"*-ba{step}")]:
            shutil.rmtree(path)
    kept_lines = [line for line in metrics(folder) if "loss/total" in line or line["step"] != 6]
    text = "".join(json.dumps(line) + "\n" for line in kept_lines)
    (folder / "metrics.jsonl").write_text(text)
    code, said = run(tiny, *options, "trainer.keep_checkpoints=1")
    assert code == 0 and "ba6" in said
    assert measured(folder, "knn") == figures
    lines = (folder / "evaluation" / "history.jsonl").open()
    assert [json.loads(line)["step"] for line in lines] == sorted(figures)
    (kept,) = (folder / "checkpoints" / "best").glob("ep*")
    assert kept.name.endswith(f"-ba{best}")
    assert [path.name for path in (folder / "checkpoints").glob("ep*")] == ["ep3-ba12"]

    arguments = ["--model", str(kept.parent), "--data", str(tmp_path / "images"), "k=3"]
    before = (folder / "evaluation" / "knn.json").read_text()
    assert evaluate.main(["knn", *arguments, "baseline=false"]) == 0
    assert (folder / "evaluation" / "knn.json").read_text() == before or best == 12
    ending = "" if best == 12 else f"_step{best}"
    found = json.loads((folder / "evaluation" / f"knn{ending}.json").read_text())
    assert found["results"]["top1"] == figures[best]["top1"] and found["step"] == best


def test_an_evaluation_that_fails_does_not_end_the_training(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise UserError("the data are gone")

    monkeypatch.setattr(during_training, "measure_checkpoint", fails)
    short = ("trainer.max_duration=1ep", "evaluation={knn: {every: 2ba, k: 3}}")
    code, said = run(tiny, *short)
    assert code == 0, said
    assert "evaluation.knn after step 2 failed; training continues: the data are gone" in said
    assert measured(tmp_path / "runs" / "tiny", "knn") == {2: {}, 3: {}}
    assert (tmp_path / "runs" / "tiny" / "evaluation" / "knn.json").exists()  # measured in the end


def test_random_states_are_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with during_training.unchanged_random_state():
        draw()
        torch.manual_seed(9)
    assert draw() == expected


def test_ranks_wait_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks after one another: what the first sends, the second receives."""
    sent: list[Any] = []

    device: Any = SimpleNamespace(tensor_to_device=lambda tensor: tensor)
    clock = iter(range(0, 1000, 2))  # each look at it is 2 s later
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_global_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: sent.append(tensor.clone()))
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values: sent.append(list(values)))

    def work(go_on: Callable[[], None]) -> str:
        for _ in range(10):
            go_on()
        return "done"

    assert collectives.while_others_wait(work, device) == "done"
    *signs, last, _ = [int(sign) if isinstance(sign, torch.Tensor) else sign for sign in sent]
    assert set(signs) == {1} and len(signs) > 3 and last == 0

    monkeypatch.setattr(dist, "get_global_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.copy_(sent.pop(0)))

    def receive(values: list[Any]) -> None:
        values[:] = sent.pop(0)

    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    assert collectives.while_others_wait(work, device) == "done" and not sent
