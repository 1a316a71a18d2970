"""The questions that a run was trained on, and what answers them: how its page begins."""

from dataclasses import dataclass

from pospre.model.question import Question
from pospre.report.plots import format_value
from pospre.report.run import Run
from pospre.untrusted_json import is_number


@dataclass(frozen=True)
class Asked:
    """A question that a run was trained on.

    Attributes:
        method: the algorithm's name.
        question: what it asks.
        answer: the last value of its own measure, with what that is; empty where none is logged.
    """

    method: str
    question: Question
    answer: str


def questions_of(run: Run) -> list[Asked]:
    """Return what the run's algorithms ask, in the order of their attachment."""
    asked = _of_classes(run.algorithms) if run.questions is None else run.questions
    return [Asked(name, each, _answer(run, name, each)) for name, each in asked.items()]


def _of_classes(names: list[str]) -> dict[str, Question]:
    """Return the questions of algorithms of this version; importing them takes seconds."""
    from pospre.model.algorithm import algorithm_class, algorithm_names

    classes = {name: algorithm_class(name) for name in names if name in algorithm_names()}
    return {name: each.question for name, each in classes.items() if each.question is not None}


def _answer(run: Run, name: str, question: Question) -> str:
    key = f"metric/{name}_{question.metric}"
    values = [record[key] for record in run.records if is_number(record.get(key))]
    if question.metric is None or not values:
        return ""
    percent = question.metric in ("accuracy", "agreement")
    first, last = (
        format_value(value, percent=percent).replace(" ", "\N{NO-BREAK SPACE}")
        for value in (values[0], values[-1])
    )
    return f"{question.meaning}: {last}" + (f" (at first {first})" if len(values) > 1 else "")
