"""The verdict's sentences, and what they follow from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.evaluation.early_stop import look_steps, reason_to_stop
from pospre.evaluation.estimates import compared
from pospre.evaluation.registry import START
from pospre.evaluation.verdict import Judgement, judge, power_line, split_figure
from pospre.recipe.monitoring import Verdict
from tests.refusals import refuses

FIGURE, GUARD = "knn/top1", "logistic/top1"


def document(won: int, lost: int, images: int = 1000, **other: Any) -> dict[str, Any]:
    """Return results in which so many images differ, and half of the others are right."""
    right = torch.arange(images) % 2 == 0
    own, start = right.clone(), right.clone()
    own[:won], start[:won] = True, False
    own[won : won + lost], start[won : won + lost] = False, True
    results = compared("top1", {"": own, START: start})
    found = {"weights": "teacher", "settings": {"half": "judge"}, "start_sha256": "a"}
    return {**found, "results": results, **other}


def verdict(knn: dict[str, Any], *, figure: str | None = FIGURE, **others: Any) -> Judgement:
    guards = (GUARD,) if "logistic" in others else ()
    declared = Verdict(figure=figure, guard=guards, weights="teacher")
    return judge(declared, "dino.pth", {"knn": knn, **others})


def test_better() -> None:
    found = verdict(document(61, 36), logistic=document(20, 30))
    assert found.outcome == "better" and found.sentence == (
        "Adapted is better. The teacher's knn/top1 51.2 % against 48.7 % for the frozen start on "
        "the same 1000 images (+2.5, 95 % +0.6 to +4.4; 61 won, 36 lost)."
    )


def test_no_difference() -> None:
    found = verdict(document(30, 26))
    assert found.outcome == "none" and found.sentence == (
        "No difference shown. The teacher's knn/top1 50.2 % against 49.8 % for the frozen start on "
        "the same 1000 images (+0.4, 95 % -1.1 to +1.9; 30 won, 26 lost); this many images show "
        "2.1 or more. Keep the frozen start: dino.pth."
    )
    same = verdict(document(0, 0))
    assert same.outcome == "none" and "0 won, 0 lost" in same.sentence
    assert "this many images show 2.8 or more" in same.sentence
    few = verdict(document(9, 2, 40))
    assert few.outcome == "none" and few.sentence.startswith("Too few images: no difference shown.")


@pytest.mark.parametrize(
    ("gain", "outcome", "words"),
    [
        (0.1, "better", "is better. The student's depth/rmse 0.4 m against 0.5 m for the frozen"),
        (-0.1, "worse", "0.6 m against 0.5 m"),
        (0.0, "none", "0.5 m against 0.5 m"),
    ],
)
def test_figures_in_metres_are_no_percent(gain: float, outcome: str, words: str) -> None:
    """Also below 1 metre; the smaller, the better."""
    start = torch.linspace(0.4, 0.6, 100).double()
    results = compared("rmse", {"": start - gain, START: start})
    judged = {"weights": "student", "settings": {"half": "judge"}, "results": results}
    found = judge(Verdict(figure="depth/rmse"), "dino.pth", {"depth": judged})
    assert found.outcome == outcome and words in found.sentence
    difference = f"{-gain:+.1g}" if gain else "+0"  # of the figures, as they are
    assert f"({difference}, 95 % {difference} to {difference})" in found.sentence
    assert ("no images differ. Keep" in found.sentence) == (not gain)


@pytest.mark.parametrize("guarded", [False, True])
def test_worse(guarded: bool) -> None:
    if guarded:
        found = verdict(document(80, 20), logistic=document(20, 60))
    else:
        found = verdict(document(36, 61))
    assert found.outcome == "worse" and found.sentence.startswith("Worse than the frozen start. ")
    assert (GUARD if guarded else FIGURE) in found.sentence
    assert found.sentence.endswith("Keep the frozen start: dino.pth.")


def test_what_was_not_measured_has_no_verdict() -> None:
    drift = {"results": {"patch_cosine": 0.934, "patch_kept": 0.81}}
    kept = "features kept: patch cosine 0.93, nearest patches 0.81"
    nothing = "Nothing here can say whether it helped"
    assert verdict({}, figure=None, drift=drift).sentence == f"{nothing}; {kept}."
    half = {"half": "choose"}
    for knn in (
        {},
        document(9, 1, settings=half),  # a look
        document(9, 1, settings={}),
        document(9, 1, weights="student"),
        document(9, 1, results={"top1": 0.5}),  # without the start
        document(9, 1, results={"top1": 0.5, "start_top1": 1, "top1_over_start": {"se": "x"}}),
    ):
        assert verdict(knn) == ("unknown", f"{nothing}: knn/top1 was not measured beside it.")
    later = {"results": {}, "step": 8}
    old = verdict(document(61, 36, step=4), drift=later)  # the measurement after step 8 has failed
    said = f"{nothing}: knn/top1 was measured after step 4, and the run is at 8."
    assert old == ("unknown", said)
    assert verdict(document(61, 36, step=8), drift={**later, "step": 4}).outcome == "better"
    other = verdict(document(61, 36), logistic=document(20, 30, start_sha256="b"))
    assert other.outcome == "unknown" and "beside different starts" in other.sentence


def test_three_worse_looks_in_a_row_end_a_run(tmp_path: Path) -> None:
    assert look_steps(1000)[:3] == [300, 350, 400] and look_steps(1000)[-1] == 950
    assert look_steps(4) == [1, 2, 3]
    worse, same = (36, 61), (30, 26)
    declared, history = Verdict(figure=FIGURE, weights="teacher"), tmp_path / "history.jsonl"

    def reason(step: int, **looks: tuple[int, int]) -> str | None:
        choose: dict[str, Any] = {"name": "knn", "settings": {"half": "choose"}}
        found = [{**document(*each), **choose, "step": int(at[1:])} for at, each in looks.items()]
        history.write_text("".join(json.dumps(line) + "\n" for line in found))
        return reason_to_stop(declared, history, step, 1000)

    all_worse = {"s300": worse, "s350": worse, "s400": worse}
    said = reason(400, **all_worse)
    assert said is not None and said.startswith(f"{FIGURE} was worse than the frozen start's after")
    assert "300, 350, 400" in said
    for step, looks in (
        (400, {**all_worse, "s350": same}),
        (400, {"s300": worse, "s400": worse}),  # one look failed
        (350, all_worse),
        (410, all_worse),
        (450, all_worse),
    ):
        assert reason(step, **looks) is None


def test_what_images_can_show_is_said_before_training() -> None:
    assert power_line(FIGURE, 1000) == (
        "verdict: knn/top1 will be judged on 1000 images: they show a difference of 2.8 points if "
        "a tenth of them is judged differently, of 4.8 if three tenths are"
    )
    assert power_line(FIGURE, 60).endswith("Too few to show a usual gain; a collapse would show")
    decoder = power_line("segmentation/mIoU", 20)
    assert "0.63 of its spread. Too few to show" in decoder
    assert decoder.endswith("repeat with other values of evaluation.segmentation.seed")
    assert power_line("correspondence/pck", 100).endswith("0.28 of its spread")
    assert "decoder" not in power_line("logistic/top1", 100)
    refuses("only 5 images would judge knn/top1; at least 6", lambda: power_line(FIGURE, 5))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("knn", "verdict: knn is no EVALUATION/FIGURE such as knn/top1"),
        ("knn/top5", "knn/top5 cannot be compared with the start on half of the images; use one"),
        ("accuracy/top1", r"use one of .*knn/top1"),
        ("spectrum/rank", r"use one of .*segmentation/mIoU"),
        ("knm/top1", "unknown evaluation 'knm'"),
    ],
)
def test_figures_that_cannot_be_judged(name: str, said: str) -> None:
    refuses(said, lambda: split_figure(name))
