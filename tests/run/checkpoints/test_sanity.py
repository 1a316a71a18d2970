"""Checkpoints whose hash is right and whose content is odd: passed over, and no traceback."""

import copy
import datetime
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composer.core import Timestamp
from composer.utils import reproducibility

from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.checkpoints.saver import plain_random
from pospre.training.build import load_model
from tests.refusals import refuses
from tests.run.checkpoints.checkpoint_files import CONTENT, write_checkpoint
from tests.training.tiny_runs import SHORT, Run, curve


def content() -> dict[str, Any]:
    """Return the content of a checkpoint with all that is looked at."""
    made = copy.deepcopy(CONTENT)
    made["state"]["timestamp"] = {"Timestamp": Timestamp(batch=4).state_dict()}
    schedule = {"last_epoch": 4, "_step_count": 5, "_last_lr": [0.1]}
    made["state"]["schedulers"] = {"StepSchedule": schedule}
    made["rng"] = plain_random(reproducibility.get_rng_state())
    return made


def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
    """Return what takes a value out of a checkpoint's content."""
    *path, last = keys
    return lambda content: functools.reduce(dict.__getitem__, path, content).pop(last)


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Return what puts a value into a checkpoint's content."""

    def change(content: dict[str, Any]) -> None:
        *path, last = keys
        place: Any = content
        for key in path:
            place = place[key]
        place[last] = value

    return change


CLOCK = ("state", "timestamp", "Timestamp")
SCHEDULE = ("state", "schedulers", "StepSchedule")
RECORD = ("state", "callbacks", "RecipeRecord")
NUMPY = plain_random(reproducibility.get_rng_state())[0]["numpy"]

ODD = [
    ("timestamp", without("state", "timestamp")),  # weights alone, as others save them
    ("optimizers", without("state", "optimizers")),
    ("rng", without("rng")),
    ("algorithms", put("state", "algorithms", value=[["StoP"]])),
    ("optimizers", put("state", "optimizers", value=[1])),
    ("timestamp", put("state", "timestamp", value=[1])),
    ("timestamp", put("state", "timestamp", value={})),
    ("timestamp", put(*CLOCK, value={"batch": 4})),
    ("timestamp", put(*CLOCK, "batch", value="4")),
    ("timestamp", put(*CLOCK, "batch", value=-4)),
    ("timestamp", put(*CLOCK, "epoch_wct", value=3)),
    ("timestamp", put(*CLOCK, "total_wct", value=datetime.timedelta(-1))),
    ("schedulers", put("state", "schedulers", value=["StepSchedule"])),
    ("schedulers", put(*SCHEDULE, value={})),
    ("schedulers", put(*SCHEDULE, "last_epoch", value=None)),
    ("schedulers", put(*SCHEDULE, "_last_lr", value=["a"])),
    ("rng", put("rng", value=7)),
    ("rng", put("rng", value=[{}])),
    ("rng", put("rng", 0, "python", value=(3, (1, 2), None))),
    ("rng", put("rng", 0, "torch", value=[1, 2])),
    ("rng", put("rng", 0, "numpy", value=("MT19937", [1], 0, 0, 0.0))),
    # numpy reads there, millions of words behind its own
    ("rng", put("rng", 0, "numpy", value=(*NUMPY[:2], 10**8, 0, 0.0))),
    ("rng", put("rng", 0, "numpy", value=(*NUMPY[:2], -(10**8), 0, 0.0))),
    ("rng", put("rng", 0, "cuda", value="state")),
    ("model", put("state", "model", value={"a": 1})),
    ("recipe", put(*RECORD, value={})),
    ("recipe", put(*RECORD, "num_samples", value="many")),
    ("recipe", without(*RECORD, "fingerprints")),
    ("recipe", put(*RECORD, "unknown", value={})),
    ("recipe", put(*RECORD, "data", value={"labels": 3})),
    ("recipe", put(*RECORD, "fingerprints", value=["encoder.weights"])),
    ("recipe", put(*RECORD, "fingerprints", value={"encoder.weights": 3})),
    ("recipe", put(*RECORD, "starts", value=["0"])),
    ("recipe", put(*RECORD, "fresh", value=[3])),
    ("recipe", put(*RECORD, "classes", value=["cat", 3])),
    ("recipe", put(*RECORD, "classes", value={"cat": 3})),
    ("recipe", put(*RECORD, "recipe", "encoder", value=None)),
]


@pytest.mark.parametrize(("part", "change"), ODD)
def test_what_is_odd_is_passed_over(
    part: str, change: Callable[[Any], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(content(), tmp_path / "ep0-ba2")
    odd = content()
    change(odd)
    path = tmp_path / "ep1-ba4"
    write_checkpoint(odd, path)
    newest = open_newest([str(tmp_path)])
    assert newest is not None and newest.uri == f"{tmp_path}/ep0-ba2"
    said = f"no run can resume from {path}: its '{part}' is not valid"
    assert f"warning: {said}; passed over\n" in capfd.readouterr().err
    refuses(f"its '{part}' is not valid", lambda: read_checkpoint(str(path)))


def test_a_run_goes_on_from_the_one_before(tiny: Path, run: Run, trained: Path) -> None:
    folder, whole = trained, curve(trained)
    path = folder / "checkpoints" / "ep1-ba6"
    odd = read_checkpoint(str(path)).content
    odd["rng"][0]["numpy"] = (*NUMPY[:2], 10**8, 0, 0.0)
    write_checkpoint(odd, path)
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"no run can resume from {path}: its 'rng' is not valid" in said
    assert f"resuming from {folder}/checkpoints/ep1-ba4" in said and curve(folder) == whole
    # what only the optimiser would find
    odd = read_checkpoint(str(path)).content
    odd["state"]["optimizers"] = {"AdamW": [1]}
    write_checkpoint(odd, path)
    code, said = run(tiny, *SHORT, "trainer.max_duration=8ba")
    assert code == 2 and "holds a state that is not valid" in said, said
    assert "Traceback" not in said and load_model(str(path))[1].run_name == "tiny"
