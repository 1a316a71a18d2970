"""Whether training improved on the weights it started from: one sentence, from paired figures.

A recipe's ``verdict`` declares the figure and its guards before training. Better: the 95 % interval
of the paired difference to the frozen start is above 0, and no guard is worse. Worse: it is below
0, or a guard is worse (two-sided p below 0.05, adjusted by Holm for the number of guards). Else no
difference is shown. The sentence follows from the recipe and from ``evaluation/*.json`` alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from pospre.errors import UserError
from pospre.evaluation.common_settings import Half
from pospre.evaluation.dense.settings import Trained
from pospre.evaluation.paired import Paired, detectable, holm
from pospre.evaluation.registry import (
    OVER_START,
    START,
    evaluation_names,
    figures_of,
    measured_in,
    settings_class,
    takes_start,
    units_of,
)
from pospre.recipe.monitoring import Verdict
from pospre.untrusted_json import is_number

DRIFT = "drift"
LEAST_IMAGES = 6
"""With fewer images that differ, no result is significant."""
_RATES = ("top1", "top5")
_SIGNIFICANT = 0.05
_NOTHING = "Nothing here can say whether it helped"
_FEW = 0.1  # a difference of rates that fewer images cannot show


Documents = Mapping[str, Mapping[str, Any]]


class Judgement(NamedTuple):
    """The verdict, and the sentence that says it."""

    outcome: Literal["better", "none", "worse", "unknown"]
    sentence: str


class Measured(NamedTuple):
    """A figure to judge by: the judged encoder's, the start's, and their comparison."""

    name: str
    value: float
    start: float
    paired: Paired  # positive: better than the start
    start_sha256: str = ""

    @property
    def measured_in(self) -> str | None:
        """What it is in; None: it is a share, and written in percent."""
        evaluation, _, key = self.name.partition("/")
        return measured_in(evaluation, key)

    @property
    def units(self) -> str:
        """What was measured: images, or videos."""
        return units_of(self.name.partition("/")[0])

    def points(self, difference: float) -> str:
        """Write a difference with its sign."""
        is_share = self.measured_in is None
        return f"{100 * difference:+.1f}" if is_share else f"{difference:+.3g}"

    def compared(self, other: str) -> str:
        """Describe the figure and that of the ``other``, their difference, and its interval."""
        evaluation, _, key = self.name.partition("/")
        is_least = figures_of(evaluation).get(key) == "min"
        paired = turned(self.paired) if is_least else self.paired
        low_high = map(self.points, paired.interval)
        unit = self.measured_in
        own, beside = (
            f"{100 * each:.1f} %" if unit is None else f"{each:.3g} {unit}"
            for each in (self.value, self.start)
        )
        counts = "" if paired.won is None else f"; {paired.won} won, {paired.lost} lost"
        return (
            f"{self.name} {own} against {beside} for {other} on the same {paired.images} "
            f"{self.units} ({self.points(paired.difference)}, 95 % {' to '.join(low_high)}{counts})"
        )


def split_figure(name: str) -> tuple[str, str]:
    """Return the evaluation and the figure of ``knn/top1``; raise a ``UserError`` if wrong."""
    evaluation, _, key = name.partition("/")
    if not key:
        raise UserError(f"recipe: verdict: {name} is no EVALUATION/FIGURE such as knn/top1")
    settings = settings_class(evaluation)
    known = figures_of(evaluation)
    if key not in known or not takes_start(evaluation) or "half" not in settings.model_fields:
        able = [
            f"{each}/{figure}"
            for each in evaluation_names()
            if "half" in settings_class(each).model_fields
            for figure in figures_of(each)
        ]
        raise UserError(
            f"recipe: verdict: {name} cannot be compared with the start on half of the images; "
            f"use one of {', '.join(able)}"
        )
    return evaluation, key


def power_line(name: str, images: int) -> str:
    """Say before training what this many images can show; raise a ``UserError`` if nothing."""
    evaluation, _, figure = name.partition("/")
    units = units_of(evaluation)
    if images < LEAST_IMAGES:
        raise UserError(
            f"recipe: verdict: only {images} {units} would judge {name}; at least {LEAST_IMAGES} "
            f"must differ before a difference can be significant. Give more {units} as verdict.data"
        )
    line = f"verdict: {name} will be judged on {images} {units}"
    if figure in _RATES:
        few, many = (100 * detectable(share, images) for share in (0.1, 0.3))
        line += (
            f": they show a difference of {few:.1f} points if a tenth of them is judged "
            f"differently, of {many:.1f} if three tenths are"
        )
    else:
        line += f": they show a mean difference of {2.8 / images**0.5:.2g} of its spread"
    if is_few(images):
        line += ". Too few to show a usual gain; a collapse would show"
    if issubclass(settings_class(evaluation), Trained):
        line += (
            ". A decoder is trained beside each encoder, and its own noise is not in the interval: "
            f"repeat with other values of evaluation.{evaluation}.seed"
        )
    return line


def is_few(images: int) -> bool:
    """Return whether images are too few to show a difference of ten points."""
    return detectable(0.1, images) > _FEW


def figures_to_judge(verdict: Verdict) -> list[str]:
    """Return the figure of a verdict, if it has one, and its guards."""
    return [*([] if verdict.figure is None else [verdict.figure]), *verdict.guard]


def judge(verdict: Verdict, start: str, documents: Documents) -> Judgement:
    """Return the verdict on weights that were measured beside their ``start``.

    Args:
        verdict: what was declared before training.
        start: address of the weights that training started from.
        documents: results of evaluations by name, as ``figures.read_documents``.
    """
    if verdict.figure is None:
        return Judgement("unknown", f"{_NOTHING}{_kept(documents)}.")
    by_name = {
        name: _measured(name, verdict, documents, "judge") for name in figures_to_judge(verdict)
    }
    measured = [one for one in by_name.values() if one is not None]
    if len(measured) < len(by_name):
        missing = next(name for name, one in by_name.items() if one is None)
        sentence = f"{_NOTHING}: {missing} was not measured beside it{_kept(documents)}."
        return Judgement("unknown", sentence)
    if len({one.start_sha256 for one in measured}) > 1:
        return Judgement("unknown", f"{_NOTHING}: its figures are beside different starts.")
    newest = max(map(_step, documents.values()))
    for name in by_name:
        if (step := _step(_document(name, documents))) < newest:
            when = f"after step {step}, and the run is at {newest}"
            return Judgement("unknown", f"{_NOTHING}: {name} was measured {when}.")
    keep = f"Keep the frozen start: {start}."
    return of_figures(measured, f"The {verdict.weights}'s", "the frozen start", keep)


def of_figures(measured: Sequence[Measured], whose: str, other: str, keep: str) -> Judgement:
    """Return the verdict by a figure and its guards, which follow it.

    In its sentence, ``whose`` names the judged encoder, such as "The teacher's", ``other`` what it
    is compared with, and ``keep`` says what to do unless it is better.
    """
    main, *guards = measured
    adjusted = holm([1.0 if one.paired.p is None else one.paired.p for one in guards])
    pairs = zip(guards, adjusted, strict=True)
    harmed = [one for one, p in pairs if p < _SIGNIFICANT and one.paired.difference < 0]
    is_sure, gain = main.paired.is_sure, main.paired.difference
    if harmed or (is_sure and gain < 0):
        worst = harmed[0] if harmed else main
        return Judgement("worse", f"Worse than {other}. {whose} {worst.compared(other)}. {keep}")
    if is_sure:
        return Judgement("better", f"Adapted is better. {whose} {main.compared(other)}.")
    few = f"Too few {main.units}: no" if is_few(main.paired.images) else "No"
    limit = f"no {main.units} differ"
    if main.paired.se or main.paired.won is not None:  # else the spread of values is not known
        shown = main.points(main.paired.shown).lstrip("+")
        limit = f"this many {main.units} show {shown} or more"
    sentence = f"{few} difference shown. {whose} {main.compared(other)}; {limit}. {keep}"
    return Judgement("none", sentence)


def is_worse(verdict: Verdict, look: Mapping[str, Any]) -> bool:
    """Return whether the figure is worse than the start's at a look on the half ``choose``."""
    name = verdict.figure or ""
    found = _measured(name, verdict, {name.partition("/")[0]: look}, "choose")
    return found is not None and found.paired.is_sure and found.paired.difference < 0


def _measured(name: str, verdict: Verdict, documents: Documents, half: Half) -> Measured | None:
    """Return a declared figure on a half of the images; None if it was not measured on it."""
    evaluation, _, key = name.partition("/")
    document = _document(name, documents)
    is_judged = document.get("settings", {}).get("half") == half
    is_same = document.get("weights") == verdict.weights
    if evaluation not in evaluation_names() or not (is_judged and is_same):
        return None
    results = document["results"]
    try:
        paired = Paired.model_validate(results.get(f"{key}{OVER_START}"))
    except ValidationError:
        return None
    value, start = results.get(key), results.get(f"{START}{key}")
    if not (is_number(value) and is_number(start)):
        return None
    if figures_of(evaluation).get(key) == "min":
        paired = turned(paired)
    return Measured(name, value, start, paired, str(document.get("start_sha256")))


def _document(name: str, documents: Documents) -> Mapping[str, Any]:
    """Return the results of a figure's evaluation, or nothing."""
    return documents.get(name.partition("/")[0], {})


def _step(document: Mapping[str, Any]) -> int:
    """Return the step that was measured; -1: none is noted."""
    step = document.get("step")
    return step if type(step) is int else -1


def turned(paired: Paired) -> Paired:
    """Return the comparison of the second model with the first, without the bootstrap."""
    other_way = {"difference": 0.0 - paired.difference, "won": paired.lost, "lost": paired.won}
    return paired.model_copy(update={**other_way, "bootstrap": None})


def _kept(documents: Documents) -> str:
    """Describe in words what is left of the start's features."""
    results = documents.get(DRIFT, {}).get("results", {})
    names = {"patch_cosine": "patch cosine", "patch_kept": "nearest patches"}
    words = [
        f"{name} {results[key]:.2f}" for key, name in names.items() if is_number(results.get(key))
    ]
    return f"; features kept: {', '.join(words)}" if words else ""
