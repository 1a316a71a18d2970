"""``trainer.save_interval: auto``: when it saves, what it says, and that it changes no step."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from pospre.run.checkpoints import intervals
from pospre.run.checkpoints.folders import remove
from pospre.run.checkpoints.intervals import AutoInterval, best_interval
from pospre.run.checkpoints.reading import read_checkpoint
from tests.training.tiny_runs import Run, curve, flat

SHORT = ("trainer.max_duration=6ba", "trainer.save_interval=auto")


@pytest.mark.parametrize(("save", "between"), [(0.3, 86_400.0), (5.0, 10_000.0)])
def test_the_interval_loses_the_least_time(save: float, between: float) -> None:
    def lost(seconds: float) -> float:
        return save / seconds + seconds / 2 / between

    best = best_interval(save, between)
    assert lost(best) < min(lost(0.9 * best), lost(1.1 * best))
    assert best_interval(2.0, 3600.0) == 120


def planned(
    times: Sequence[float], steps: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> AutoInterval:
    """Return what has saved after some steps; each save reads the clock at begin and end."""
    monkeypatch.setattr(intervals, "monotonic", iter(times).__next__)
    auto = AutoInterval(7200.0, nodes=2)
    auto.fit_start(0)
    auto._since = 0.0  # as read after half of the first steps
    for step in steps:
        auto.begin()
        auto.end(step)
    return auto


def test_steps_to_the_next_save_follow_from_the_clock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # ten steps of 0.6 s, a save of 2 s: sqrt(2 * 2 s * 3600 s) = 120 s = 200 steps
    assert planned([6, 8], [20], monkeypatch).next == 220
    said = capsys.readouterr().out
    assert said.startswith("save_interval: auto saves every 120 s, about 200 steps: training waits")
    assert "waits 2 s for a save" in said and "every 1 h (of one node / 2)" in said
    # steps of 1.2 s from then on; one save of three stalls for 500 s
    times = [6, 8, 248, 250, 250 + 120, 870]
    assert planned(times, [20, 220, 320], monkeypatch).next == 420
    assert capsys.readouterr().out.count("save_interval") == 1  # 120 s still
    # an evaluation's save before anything is timed, and one that is cheaper than a step
    assert planned([0, 2], [5], monkeypatch).next == 25
    assert planned([6000, 6000.001], [20], monkeypatch).next == 21


def test_saves_change_no_step_and_the_run_resumes(
    tiny: Path, run: Run, six_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intervals, "FIRST", 2)
    monkeypatch.setattr(intervals, "monotonic", itertools.count(0.0, 1.0).__next__)
    # a save of 1 s, a step of 1 s, sqrt(2 * 1 s * 4.5 s) = 3 s
    options = (*SHORT, "trainer.hours_between_failures=0.00125")
    code, said = run(tiny, *options)
    assert code == 0 and "save_interval: auto saves every 3 s, about 3 steps" in said
    folder = tmp_path / "runs" / "tiny"
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"ep0-ba2", "ep1-ba5", "ep1-ba6"}
    remove(folder / "checkpoints" / "ep1-ba6")
    code, said = run(tiny, *options)
    assert code == 0 and "resuming from" in said and "ep1-ba5" in said
    assert curve(folder) == curve(six_steps)
    ours, theirs = (
        read_checkpoint(str(where / "checkpoints" / "ep1-ba6")).content["state"]
        for where in (folder, six_steps)
    )
    for key in ("model", "optimizers"):
        assert flat(ours[key]) == flat(theirs[key])
