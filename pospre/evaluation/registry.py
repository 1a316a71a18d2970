"""Evaluations by name: ``pospre/evaluation/<kind>/…/<name>.py`` is ``<name>``.

An evaluation has a settings class of the same name in ``pospre/evaluation/<kind>/settings.py``
(``position_grid``: ``PositionGrid``), and a module with

- ``evaluate(context, settings) -> dict``, which returns plain numbers, strings and lists (JSON);
  ``results_table`` prints them, and ``--help`` the ``Returns`` of its docstring. The fields of the
  settings are keys of the command line and of a recipe's ``evaluation`` section; fields without a
  default are required. ``MEASURED_AT`` of the settings class, if it has one, says that a run with a
  ``verdict`` always measures it, and when besides ``every``: ``"start"``, before the first step
  alone (unless there is an ``every``), or ``"stages"``, then, after each stage and at the end;
- ``NEEDS``, if it needs a trained method: the class of its objective, such as
  ``PositionObjective``, or of the algorithm itself. Any method that declares this class will do;
- ``FIGURES``: the main results, and whether the largest or smallest is best: ``{"top1": "max"}``.
  Evaluations during training log them;
- ``check(plan)``, if it can fail: raises a UserError for every cause that is known without a model.
  It is called before ``evaluate``, and by a recipe before training. ``evaluate`` gets its return
  value, such as opened data or models, as ``context.opened``. Errors of both are prefixed with the
  evaluation's name;
- ``missing(plan, opened) -> dict[str, str]``, if some of ``FIGURES`` need more than ``check``
  demands: those that will be None, each with the cause and the remedy;
- ``OPENS_START = True`` if it reads ``context.start`` and its settings are not ``Compared``;
- ``OWN_DATA = True`` if the data are not labelled images; ``check`` then opens them;
- ``images(opened) -> int``, if the measured images are not all of the data: their number;
- ``UNITS``, if these are not images: ``"videos"``;
- ``MEASURED_IN``, if some of ``FIGURES`` are no shares of 1: what they are in: ``{"rmse": "m"}``;
- ``alarms(results) -> list[str]``, if results can mean trouble: a line for each, its numbers after
  a colon, which training prints and keeps when it is new.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined
from tqdm import tqdm

import pospre.evaluation
from pospre.docstrings import docstrings
from pospre.errors import UserError, needing, suggestion
from pospre.evaluation.common_settings import Compared, Settings
from pospre.option_texts import option_lines, options_of
from pospre.recipe.recipe import Recipe

if TYPE_CHECKING:  # slow to import for --help and errors in settings
    import torch

    from pospre.model.model import PretrainModel

_ROOT = Path(pospre.evaluation.__path__[0])
_LARGEST = 1e30  # float32's maximum is 3e38, and values are multiplied
# keys of a recipe's section besides the settings
_ELSEWHERE = {
    "data": " On the command line it is --data …",
    "weights": " On the command line it is --weights …",
    "every": " It belongs in a recipe: the interval of evaluations during training.",
}
UNTRAINED = "initial_"
"""Prefix of the untrained model's figures."""
DIFFERENCE = "_difference"
"""Suffix of the trained model's figure minus the untrained one's; see ``compared``."""
START = "start_"
"""Prefix of the figures of the weights that a run started from."""
OVER = "_over_"
"""Before another model's prefix: a figure's comparison with it, see ``paired.Paired``."""
OVER_START = f"{OVER}{START}".removesuffix("_")
Kind = TypeVar("Kind", bound=Settings)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Plan(Generic[Kind]):
    """An evaluation's inputs before the model exists; see ``Context``."""

    name: str
    recipe: Recipe
    data: str
    settings: Kind
    folder: Path | None
    has_start: bool = False


@dataclass(frozen=True)
class Context:
    """Inputs of an evaluation.

    Attributes:
        model: the trained model, in eval mode on ``device``.
        initial: makes the model with random weights, in eval mode on ``device``.
        start: makes the encoder that training started from, as published; None: random weights.
        others: further models to compare with, in eval mode on ``device``, by prefix.
        data: folder, ``.beton`` file or MDS directory to measure on.
        device: for the model and the batches.
        folder: for the evaluation's own files, created when it writes; None: nothing is written.
        progress: whether to draw progress bars.
        opened: the return value of the evaluation's ``check``.
        storage: access to the data, as in training: arguments of ``open_reader``.
        moved: how far the run's student and teacher are from the start, see ``models.moved``.
        go_on: called regularly in long work; raises an exception to stop it.
    """

    model: "PretrainModel"
    initial: "Callable[[], PretrainModel]"
    data: str
    device: "torch.device"
    folder: Path | None = None
    progress: bool = True
    opened: Any = None
    storage: Mapping[str, Any] = field(default_factory=dict)
    go_on: Callable[[], None] = lambda: None
    start: "Callable[[], PretrainModel] | None" = None
    others: "Mapping[str, PretrainModel]" = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)

    def track(self, items: Iterable[Item], title: str, **options: Any) -> Iterator[Item]:
        """Yield items under a progress bar (``options`` are tqdm's); call ``go_on`` after each."""
        for item in tqdm(items, title, disable=not self.progress, **options):
            yield item
            self.go_on()

    def models(self, *, baseline: bool) -> "dict[str, PretrainModel]":
        """Return the model and those to compare with, with ``baseline`` also the untrained one.

        They are by their figures' prefix.
        """
        start = {} if self.start is None else {START: self.start()}
        untrained = {UNTRAINED: self.initial()} if baseline else {}
        return {"": self.model, **start, **self.others, **untrained}

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the views that the encoder takes."""
        return self.model.encoder.image_size


def evaluation_names() -> list[str]:
    """Return the names of all evaluations, sorted."""
    return sorted(_evaluations())


def settings_class(name: str) -> type[Settings]:
    """Return the settings class of evaluation ``name``, without importing the evaluation."""
    known = _evaluations()
    if name not in known:
        raise UserError(f"unknown evaluation '{name}'.{suggestion(name, known)}")
    return known[name][0]


def default_settings(name: str) -> dict[str, Any]:
    """Return the default settings of ``name``; required ones are ``PydanticUndefined``."""
    return _defaults(settings_class(name))


def _defaults(kind: type[Settings]) -> dict[str, Any]:
    return {key: kind.model_fields[key].default for key in kind.names()}


def evaluation_module(name: str) -> ModuleType:
    """Return the module of evaluation ``name``."""
    settings_class(name)
    with needing("evaluate", f"the evaluation {name}"):
        module = _evaluations()[name][1].relative_to(_ROOT).with_suffix("")
        return import_module(".".join([pospre.evaluation.__name__, *module.parts]))


def figures_of(name: str) -> dict[str, Literal["max", "min"]]:
    """Return the figures of evaluation ``name``, and whether max or min is best."""
    return dict(getattr(evaluation_module(name), "FIGURES", {}))


def units_of(name: str) -> str:
    """Return what evaluation ``name`` counts: images, or what they are parts of."""
    units: str = getattr(evaluation_module(name), "UNITS", "images")
    return units


def measured_in(name: str, figure: str) -> str | None:
    """Return what a figure of evaluation ``name`` is in; None: it is a share of 1."""
    known: Mapping[str, str] = getattr(evaluation_module(name), "MEASURED_IN", {})
    return known.get(figure)


def takes_start(name: str) -> bool:
    """Return whether evaluation ``name`` also measures the weights that a run started from.

    These are an encoder, without the heads of a method.
    """
    compares = issubclass(settings_class(name), Compared)
    return compares and not hasattr(evaluation_module(name), "NEEDS")


def opens_start(name: str) -> bool:
    """Return whether ``--start`` has an effect on evaluation ``name``."""
    return takes_start(name) or hasattr(evaluation_module(name), "OPENS_START")


def check_settings(name: str, settings: Mapping[str, Any]) -> Settings:
    """Return the settings of evaluation ``name``; see ``typed_settings``."""
    return typed_settings(settings_class(name), name, settings)


def typed_settings(kind: type[Kind], name: str, settings: Mapping[str, Any]) -> Kind:
    """Return settings of a class: given ones, typed, and other defaults; ``name`` is for errors.

    Text is parsed (``"20"``, ``"true"``, ``"null"``).
    """
    defaults = _defaults(kind)
    hints = get_type_hints(kind, include_extras=True)
    typed = {}
    for key, value in settings.items():
        if key not in defaults:
            near = suggestion(key, [*defaults, *_ELSEWHERE])
            raise UserError(f"{name} has no setting '{key}'.{_ELSEWHERE.get(key, near)}")
        typed[key] = _typed(f"{name}: {key}={value}", hints[key], value)
    for key, value in {**defaults, **typed}.items():
        if value is PydanticUndefined:
            lacks = options_of(kind)[key]
            raise UserError(f"{name} needs the setting {key}: {lacks.takes}. {lacks.meaning}")
    return kind(**typed)


@contextmanager
def named_in_errors(name: str) -> Iterator[None]:
    """Prefix any ``UserError`` raised inside with the evaluation's name."""
    try:
        yield
    except UserError as error:
        raise error.restated(f"{name}: {error}") from error


def evaluate_by_name(name: str, context: Context, settings: Settings) -> dict[str, Any]:
    """Return the results of evaluation ``name``."""
    with named_in_errors(name):
        results: dict[str, Any] = evaluation_module(name).evaluate(context, settings)
    return results


def _typed(what: str, hint: Any, value: Any) -> Any:
    """Return ``value`` converted to the type ``hint``; ``what`` names it in errors."""
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    try:
        if not isinstance(value, str):
            typed = adapter.validate_python(value, strict=True)
        elif value in ("null", "none", "~"):
            typed = adapter.validate_python(None)
        else:
            typed = adapter.validate_strings(value)
    except ValidationError as error:
        # a union reports one line per member; the first is the main type
        first = error.errors()[0]
        said = "Input should have more values" if first["type"] == "missing" else first["msg"]
        raise UserError(f"{what}: {said}.") from None
    if isinstance(typed, float) and not abs(typed) < _LARGEST:
        raise UserError(f"{what}: Input should be a number below {_LARGEST:g}.")
    return typed


def describe() -> str:
    """Return all evaluations with a sentence each, for ``--help``."""
    lines = (f"  {name:20} {summary(name)}" for name in evaluation_names())
    return "\n".join(textwrap.fill(line, 98, subsequent_indent=" " * 23) for line in lines)


def summary(name: str) -> str:
    """Return the first sentence about evaluation ``name``."""
    return docstrings(_evaluations()[name][1])[""].partition("\n")[0]


def describe_one(name: str) -> str:
    """Return the description, results and settings of evaluation ``name``, for its ``--help``."""
    kind, path = _evaluations()[name]
    texts = docstrings(path)  # read without importing the module, which takes seconds
    results = " ".join(texts["evaluate"].partition("Returns:\n")[2].split())
    results = textwrap.fill(results, 98, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([texts[""], "", "results:", results, "", describe_settings(kind)])


def describe_settings(kind: type[Settings]) -> str:
    """Return the description of all settings of a class, for ``--help``."""
    heading = "settings, as key=value:" if kind.names() else "It has no settings."
    return "\n".join([heading, *option_lines(kind)])


@cache
def _evaluations() -> dict[str, tuple[type[Settings], Path]]:
    """Return the settings class and the module's file of every evaluation."""
    files = {}
    for path in _ROOT.glob("*/settings.py"):
        module = import_module(f"{pospre.evaluation.__name__}.{path.parent.name}.settings")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
                for file in path.parent.rglob(f"{name}.py"):
                    files[name] = kind, file
    return files
