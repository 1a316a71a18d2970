"""What a recipe measures, and when: its ``evaluation`` section, and what its ``verdict`` adds."""

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pospre.errors import UserError
from pospre.evaluation.figures import finite
from pospre.evaluation.registry import evaluation_names, settings_class
from pospre.evaluation.verdict import figures_to_judge, split_figure
from pospre.recipe.monitoring import Verdict
from pospre.recipe.recipe import Recipe
from pospre.training.callbacks.metrics import read_lines, write_lines

_INTERVAL = re.compile(r"[1-9]\d*(ep|ba|sp)")


class Planned(NamedTuple):
    """An entry of a recipe's ``evaluation``; without ``every`` it is measured only at the end.

    A figure of ``verdict`` is declared: it is looked at on one half of the images, and judged on
    the other. The one that may stop the run is looked at at ``early_stop.look_steps``, too.
    """

    name: str
    data: str
    weights: Literal["student", "teacher"]
    every: str | None
    settings: dict[str, Any]
    output: Path
    is_declared: bool = False
    may_stop: bool = False

    @property
    def at_stages(self) -> bool:
        """Whether it is also measured before the first step and at the end of each stage."""
        return _measured_at(self.name) == "stages"

    @property
    def at_start(self) -> bool:
        """Whether it is measured before the first step alone: what it says is of the data."""
        return _measured_at(self.name) == "start" and self.every is None

    def look(self) -> "Planned":
        """Return the same for a look during training."""
        half = {"half": "choose"} if self.is_declared else {}
        return self._replace(settings={**self.settings, **half})

    @property
    def history(self) -> Path:
        """File of the results at all looks, of this and the other evaluations."""
        return self.output.with_name("history.jsonl")

    def note(self, document: dict[str, Any]) -> None:
        """Append results to ``history`` instead of those that an earlier start has at this step.

        The file is replaced atomically.
        """
        key = document["name"], document["step"]
        lines = read_lines(self.history)
        kept = [line for line in lines if (line.get("name"), line["step"]) != key]
        write_lines(self.history, [*kept, finite(document)])

    @property
    def prefix(self) -> str:
        """Prefix of its figures in ``metrics.jsonl``."""
        return f"evaluation/{self.name}"


def planned_evaluations(recipe: Recipe) -> list[Planned]:
    """Return the entries of ``evaluation`` and ``verdict``; only the latter's are imported."""
    planned, verdict = [], recipe.verdict
    declared = {} if verdict is None else _declared(verdict)
    for name, given in {**declared, **recipe.evaluation}.items():
        settings = {"data": recipe.data.path, "weights": "student", "every": None, **given}
        if verdict is not None and name in declared:
            settings |= {"weights": verdict.weights, **declared[name]}
        data, weights, every = (settings.pop(key) for key in ("data", "weights", "every"))
        if not isinstance(data, str):
            raise UserError(f"recipe: evaluation.{name}.data = {data}; give the path of a data set")
        if weights not in ("student", "teacher"):
            raise UserError(f"recipe: evaluation.{name}.weights is student or teacher")
        if every is not None and not (isinstance(every, str) and _INTERVAL.fullmatch(every)):
            raise UserError(
                f"recipe: evaluation.{name}.every = {every}; give an interval such as 10ep "
                "(epochs), 500ba (steps) or 100000sp (samples)"
            )
        output = recipe.run_path() / "evaluation" / f"{name}.json"
        is_declared = "half" in declared.get(name, {})
        may_stop = verdict is not None and verdict.stop is not None and name == _main(verdict)
        entry = Planned(name, data, weights, every, settings, output, is_declared, may_stop)
        planned.append(entry)
    return planned


def _main(verdict: Verdict) -> str | None:
    """Return the evaluation of a verdict's figure."""
    return None if verdict.figure is None else split_figure(verdict.figure)[0]


def _declared(verdict: Verdict) -> dict[str, dict[str, Any]]:
    """Return what a verdict says of its evaluations, and those that every verdict adds."""
    data = {} if verdict.data is None else {"data": verdict.data}
    names = [split_figure(each)[0] for each in figures_to_judge(verdict)]
    added: dict[str, dict[str, Any]] = {
        name: {} for name in evaluation_names() if _measured_at(name)
    }
    return {**added, **{name: {"half": "judge", **data} for name in names}}


def _measured_at(name: str) -> Literal["start", "stages"] | None:
    """Return ``MEASURED_AT`` of an evaluation, see ``registry``."""
    return getattr(settings_class(name), "MEASURED_AT", None)
