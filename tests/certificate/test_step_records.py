"""Reading and comparing what processes wrote down."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pospre.certificate.certificate import (
    KINDS,
    Request,
    check_ends,
    check_lost,
    draw_kills,
    stages,
)
from pospre.certificate.processes import Pace
from pospre.certificate.runner import Done, Stage
from pospre.certificate.step_records import (
    ProcessRecord,
    Step,
    hash_rows,
    hash_tensors,
    read_record,
)
from pospre.certificate.verdicts import Verdict, compare

pytestmark = pytest.mark.science

END = {"end": 4, "optimiser": "o", "random": "r"}


def process(start: int | None, *steps: int, loss: float = 1.0, **rows: str) -> ProcessRecord:
    found = [Step(number, {"masks": "aa", **rows}, {"total": loss}, "p") for number in steps]
    return ProcessRecord(start, found, dict(END))


def named(verdicts: list[Verdict]) -> dict[str, Verdict]:
    return {verdict.property: verdict for verdict in verdicts}


@pytest.fixture
def values(tmp_path: Path) -> tuple[Path, Path]:
    paths = (tmp_path / "a.npz", tmp_path / "b.npz")
    for path, value in zip(paths, (1.0, 1.0 + 5e-6), strict=True):
        np.savez(path, weight=np.full(10, value))
    return paths


def test_all_of_both_trainings_of_a_step_counts(values: tuple[Path, Path]) -> None:
    whole = process(0, 1, 2, 3, 4)
    found = named(
        compare(whole, [process(0, 1, 2), process(1, 2, 3, 4)], exact=True, values=values)
    )
    assert all(verdict.holds for verdict in found.values())
    assert found["steps"].text == "4, and 1 again"
    changed = process(1, 2, 3, 4)
    changed.end = {**END, "random": "q"}
    found = named(compare(whole, [process(0, 1), changed], exact=True, values=values))
    assert found["optimiser"].holds and found["random"].text == "differs in the end"
    processes = [process(0, 1), process(1, 2, 3, masks="bb"), process(2, 3, 4)]
    found = named(compare(whole, processes, exact=True, values=values))
    assert found["masks"] == Verdict("masks", False, "differ from step 2 on", 2)
    assert found["losses"].holds
    found = named(compare(whole, [process(0, 1), process(2, 3, 4)], exact=True, values=values))
    assert found["steps"] == Verdict("steps", False, "step 2 was never trained", 2)


def test_tolerance(values: tuple[Path, Path]) -> None:
    whole = process(0, 1, 2)
    for other, holds in ((1 + 9e-6, True), (1 + 2e-5, False), (float("nan"), False)):
        processes = [process(0, 1), process(1, 2, loss=other)]
        found = named(compare(whole, processes, exact=False, values=values))
        assert found["losses"].holds is holds and found["losses"].step == (None if holds else 2)
        assert found["parameters"].text == "within 5.0e-06"
        assert "optimiser" not in found
        assert not named(compare(whole, processes, exact=True, values=values))["losses"].holds
    processes = [process(0, 1, 2)]
    processes[0].steps[1].losses["metric/cosine"] = 0.5
    whole.steps[1].losses["metric/cosine"] = 0.25  # of a rank's samples, and of the batch
    assert named(compare(whole, processes, exact=False, values=values))["losses"].holds
    assert not named(compare(whole, processes, exact=True, values=values))["losses"].holds
    np.savez(values[1], weight=np.full(10, 1.1))
    found = named(compare(whole, [whole], exact=False, values=values))
    assert found["parameters"].text == "differ by 1.0e-01" and not found["parameters"].holds


def test_lost_steps() -> None:
    processes = [process(0, 1, 2, 3), process(None), process(2, 3, 4, 5), process(5, 6)]
    ends = ["in a step", "before a step", "by SIGTERM"]
    found = check_lost(processes, ends, [2, 2, 5])
    assert found == Verdict("steps lost", True, "at most 1, none of a whole checkpoint")
    processes = [process(0, 1, 2, 3), process(2, 3)]
    assert check_lost(processes, ["in a step"], [2]).holds
    assert not check_lost(processes, ["by SIGTERM"], [2]).holds
    found = check_lost(processes, ["in a save"], [3])
    assert not found.holds
    assert found.text == "1 of 3, where a process ended in a save; 3 were saved"


def test_a_run_that_was_not_disturbed_proves_nothing(tmp_path: Path) -> None:
    kills = tuple(draw_kills("killed", 2, 8, seed=0))
    stage, pace = Stage("ranks", "ranks", kills=kills, ranks=(1, 2, 1)), Pace(1.0, 1.0)
    processes = [process(0, 1, 2), process(2, 3), process(2, 3, 4)]
    done = Done(processes, ["in a step", "in a save"], [2, 2], tmp_path, 1.0, pace)
    assert check_ends(stage, done) == Verdict("ended", True, "1 in a step, 1 in a save")
    done.processes[1] = process(2)
    found = check_ends(stage, done)
    assert not found.holds and "finished no step" in found.text
    assert check_ends(replace(stage, ranks=(1,)), done).holds  # it may be killed before a step
    done.ends.pop()
    found = check_ends(stage, done)
    assert found.text == "1 of 2 kills came too late; give more --steps" and not found.holds


def test_a_step_counts_when_all_ranks_have_written_it(tmp_path: Path) -> None:
    def line(number: int, row: str) -> dict[str, Any]:
        rows = {"masks": row}
        return {"step": number, "rows": rows, "losses": {"total": (0.5).hex()}, "parameters": None}

    marks = [{"start": 0, "coupled": ""}, {"begun": 1, "at": 10.0}]
    paths = [tmp_path / "rank0", tmp_path / "rank1"]
    for path, row in zip(paths, ("aa", "bb"), strict=True):
        lines = [*marks, {**line(1, row), "at": 10.5}, {"begun": 2, "at": 10.6}]
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with paths[0].open("a") as file:
        file.write(json.dumps({**line(2, "aa"), "at": 11.0}) + "\n" + '{"begun": 3, "a')
    with paths[1].open("a") as file:
        file.write(json.dumps({**line(2, "bb"), "at": 11.0})[:-5])
    record = read_record(paths)
    assert (record.start, record.first) == (0, 10.0)
    assert record.seconds == [0.5, pytest.approx(0.4)]
    assert record.steps == [Step(1, {"masks": "aabb"}, {"total": 0.5}, None)]
    assert read_record([tmp_path / "none"]) == ProcessRecord()


def test_hashes_tell_samples_and_tensors_apart() -> None:
    keep = torch.arange(12).view(3, 4)
    other = keep.clone()
    other[1, 2] = 99
    before, after = hash_rows({"keep": keep}), hash_rows({"keep": other})
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert hash_rows({"keep": keep[1:]}) == before[1:]  # whatever else is in the microbatch
    assert hash_rows({"keep": keep.int()}) != before and hash_rows({"k": keep}) != before
    tree = {"a": [torch.zeros(2), 1.5], "b": (np.arange(3), torch.ones(1, dtype=torch.bfloat16))}
    assert hash_tensors(tree) == hash_tensors({**tree})
    assert hash_tensors({**tree, "a": [torch.zeros(2), 1.25]}) != hash_tensors(tree)
    assert hash_tensors({**tree, "a": [torch.tensor([0.0, -0.0]), 1.5]}) != hash_tensors(tree)


def test_kills_are_drawn_from_the_seed_and_of_all_kinds() -> None:
    kills = draw_kills("killed", 9, 12, seed=3)
    assert kills == draw_kills("killed", 9, 12, seed=3)
    assert kills != draw_kills("killed", 9, 12, seed=4) != draw_kills("ranks", 9, 12, seed=4)
    assert {kill.kind for kill in kills} == set(KINDS)
    steps = [kill.step for kill in kills]
    assert steps == sorted(steps) and steps[0] >= 1 and steps[-1] <= 11


def test_which_runs_there_are() -> None:
    request = Request("mae.yaml", also=(("data.num_workers=0",), ("trainer.microbatch_size=4",)))
    plan = stages(request, coupled="", reduced=True)
    assert [(stage.name, stage.reference, stage.exact) for stage in plan] == [
        ("killed", "undisturbed", True),
        ("also1", "undisturbed", True),
        ("undisturbed_fp32", None, True),
        ("also2", "undisturbed_fp32", False),
        ("ranks", "undisturbed_fp32", False),
    ]
    assert all(stage.overrides == ("trainer.precision=fp32",) for stage in plan[2:])
    assert plan[-1].ranks == (1, 2, 1) and [kill.step for kill in plan[-1].kills] == [4, 8]
    plan = stages(request, coupled="", reduced=False)
    assert {stage.reference for stage in plan} == {"undisturbed"} and len(plan) == 4
    near = stages(Request("mae.yaml", ranks=(2, 2, 2), ends=(4, 8)), coupled="", reduced=False)
    assert {kill.step for kill in near[0].kills} <= {3, 4, 5, 7, 8, 9}  # ends of stages
    assert [(stage.title, stage.exact, stage.reference) for stage in near[1:]] == [
        ("undisturbed, 2 ranks", True, None),
        ("2 ranks beside 2", True, "undisturbed_ranks"),
    ]

    plan = stages(Request("mae.yaml"), coupled="the targets", reduced=True)
    assert [(stage.name, stage.ranks, stage.reference) for stage in plan[1:]] == [
        ("undisturbed_ranks", (2,), None),
        ("ranks", (2,), "undisturbed_ranks"),
    ]
    assert "the targets" in plan[2].title
    assert [
        stage.name for stage in stages(Request("mae.yaml", ranks=(1,)), coupled="", reduced=True)
    ] == ["killed"]
