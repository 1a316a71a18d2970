"""What a method asks of a model: how a run's page begins."""

from dataclasses import dataclass

QUESTIONS = "questions.json"
"""Where a run folder has those of its algorithms: a page is written without importing these."""


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
