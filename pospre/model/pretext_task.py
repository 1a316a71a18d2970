"""What a method asks of a model: how a run's page begins."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from pospre.untrusted_json import parse_object

PRETEXT_TASKS = "pretext_tasks.json"
"""Where a run folder has those of its algorithms: a page is written without importing these."""


@dataclass(frozen=True)
class PretextTask:
    """What a method asks of a model, and what measures the answer.

    Attributes:
        text: the task, as a question.
        metric: its own measure while training, without the method's name; None: its loss.
        meaning: what the measure is.
        evaluation: the one that answers on held-out images, if there is one.
    """

    text: str
    metric: str | None = None
    meaning: str = ""
    evaluation: str | None = None


def to_json(asked: Mapping[str, PretextTask | None]) -> bytes:
    """Return the tasks, by algorithm, as ``PRETEXT_TASKS`` has them; None has no task."""
    tasks = {name: asdict(each) for name, each in asked.items() if each is not None}
    return json.dumps(tasks, indent=1).encode()


def from_json(content: bytes) -> dict[str, PretextTask]:
    """Return the tasks that ``to_json`` has written.

    Raises:
        ValueError: it has not.
    """
    return TypeAdapter(dict[str, PretextTask]).validate_python(parse_object(content))
