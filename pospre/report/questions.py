"""What each method asks of a model: how a run's page begins."""

from dataclasses import dataclass

from pospre.report.plots import format_value
from pospre.report.run import Run, is_number


@dataclass(frozen=True)
class Question:
    """A method's question, and what answers it.

    Attributes:
        text: the question.
        metric: its own measure while training, without the method's name; None: its loss.
        meaning: what the measure is.
        evaluation: the one that answers on held-out images, if there is one.
    """

    text: str
    metric: str | None = None
    meaning: str = ""
    evaluation: str | None = None


QUESTIONS = {
    "mae": Question(
        "Most of a picture is hidden. What does the model paint in its place?",
        evaluation="reconstructions",
    ),
    "simmim": Question(
        "Large cells of a picture are masked. What does the model paint in their place?",
        evaluation="reconstructions",
    ),
    "ijepa": Question(
        "The model sees one part of a picture. Does it know the features of the others?",
        "cosine",
        "cosine of predicted and true features, both less their mean",
        "stop_heatmaps",
    ),
    "dinov2": Question(
        "Crops of one picture, large and small: does the model see that they are of one?",
        "agreement",
        "share of crops that student and teacher put to the same prototype",
    ),
    "supervised": Question(
        "Which class does a picture belong to?",
        "accuracy",
        "top-1 on the training pictures, as they are mixed",
        "accuracy",
    ),
    "droppos": Question(
        "Patches of a picture lose their position. Does the model put them back in their place?",
        "accuracy",
        "share of these patches put in their place",
        "position_grid",
    ),
    "mp3": Question(
        "A picture comes as a bag of patches. Does the model find the place of each?",
        "accuracy",
        "share of patches put in their place",
        "patch_position",
    ),
    "stop": Question(
        "The predictor is told of a place with noise only. Which noise does it learn to bear?",
        evaluation="stop_similarity",
    ),
    "lut": Question(
        "The model sees a few patches. Do they tell what the whole picture is about?",
        "similarity",
        "cosine of what the few predict and what a teacher sees in the whole",
    ),
    "crop_field": Question(
        "A crop knows where in the photograph it was cut. What did the field of places become?",
        evaluation="field",
    ),
    "masked_position": Question(
        "Patches on crosses lose their position. Does the model still know what is where?",
        "agreement",
        "share of these patches that student and teacher put to the same prototype",
    ),
}
"""By algorithm; one that only averages weights asks nothing."""


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
    return [
        Asked(name, QUESTIONS[name], _answer(run, name, QUESTIONS[name]))
        for name in run.algorithms
        if name in QUESTIONS
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
