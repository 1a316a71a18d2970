"""A method's pretext task, as described at the top of a run's page."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from pospre.untrusted_json import parse_object

PRETEXT_TASKS = "pretext_tasks.json"
"""File in a run folder with the tasks of its algorithms, so that pages need not import these."""


@dataclass(frozen=True)
class TaskDescription:
    """The task that a method sets the model, and its measure of success.

    Attributes:
        text: the task, as a question.
        metric: the measure during training, without the method's name; None: the loss.
        meaning: description of the measure.
        evaluation: the evaluation that measures it on held-out images, if any.
    """

    text: str
    metric: str | None = None
    meaning: str = ""
    evaluation: str | None = None


def to_json(asked: Mapping[str, TaskDescription | None]) -> bytes:
    """Return the tasks by algorithm in the format of ``PRETEXT_TASKS``; None: no task."""
    tasks = {name: asdict(each) for name, each in asked.items() if each is not None}
    return json.dumps(tasks, indent=1).encode()


def from_json(content: bytes) -> dict[str, TaskDescription]:
    """Return the tasks written by ``to_json``.

    Raises:
        ValueError: the content has another format.
    """
    return TypeAdapter(dict[str, TaskDescription]).validate_python(parse_object(content))
