"""The questions that a run was trained on, and what answers them: how its page begins."""

from dataclasses import dataclass

from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.model.question import Question
from pospre.report.plots import format_value
from pospre.report.run import Run, is_number


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
    """Return what the run's algorithms ask, in the recipe's order."""
    known = set(algorithm_names())  # a run of another version may have others
    asked = {name: algorithm_class(name).question for name in run.algorithms if name in known}
    return [
        Asked(name, question, _answer(run, name, question))
        for name, question in asked.items()
        if question is not None
    ]


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
