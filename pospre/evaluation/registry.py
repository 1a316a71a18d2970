"""Evaluations by name: ``pospre/evaluation/<kind>/…/<name>.py`` is ``<name>``.

An evaluation is a class of settings in ``pospre/evaluation/<kind>/settings.py``, called as it is
(``position_grid``: ``PositionGrid``), and a module with

- ``evaluate(context, settings) -> dict``, which returns plain numbers, strings and lists (JSON);
  the fields of the settings are the keys of the command line and of a recipe's ``evaluation``
  section, required where they have no default;
- ``table(results) -> str``, which renders what ``evaluate`` returned for a terminal;
- where it needs what a method has trained, ``NEEDS``: the class of its objective, such as
  ``PositionObjective``, or of the algorithm itself: any method that declares one of it will do;
- ``FIGURES``: which of the results are its figures, and whether the greatest or the smallest is
  the best: ``{"top1": "max"}``; they are what a training logs that is measured in between;
- where it may fail, ``check(plan)``: raises a UserError for every cause that can be known
  without a model. It is called before ``evaluate``, and by a recipe before it trains; what it
  returns, data or models that it had to open, ``evaluate`` finds as ``context.opened``; whatever
  either raises gets the evaluation's name in front;
- ``OWN_DATA = True`` where the data are no images with a label each, so that ``check`` opens them.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

import pospre.evaluation
from pospre.command_line import argument_texts, spelled
from pospre.errors import UserError, needing, suggestion
from pospre.evaluation.settings import Settings
from pospre.recipe.recipe import Recipe

if TYPE_CHECKING:  # --help and a mistyped setting do not wait for them
    import torch

    from pospre.model.model import PretrainModel

_ROOT = Path(pospre.evaluation.__path__[0])
_LARGEST = 1e30  # float32 ends at 3e38, and what is measured multiplies
# what a recipe's section holds beside the settings
_ELSEWHERE = {
    "data": " On the command line it is --data …",
    "weights": " On the command line it is --weights …",
    "every": " It belongs into a recipe: how often to measure while training.",
}
Kind = TypeVar("Kind", bound=Settings)


@dataclass(frozen=True)
class Plan(Generic[Kind]):
    """What is known of an evaluation before there is a model.

    Attributes:
        name: of the evaluation.
        recipe: what the model is made of, or will be.
        data: see ``Context``.
        settings: of the evaluation, of its class.
        folder: see ``Context``.
    """

    name: str
    recipe: Recipe
    data: str
    settings: Kind
    folder: Path | None


@dataclass(frozen=True)
class Context:
    """What every evaluation is given.

    Attributes:
        model: the trained model, in eval mode on ``device``.
        initial: makes the same model as it was before training, in eval mode on ``device``.
        data: folder, ``.beton`` file or MDS directory to measure on.
        device: where the model and the batches go.
        folder: where an evaluation may put files of its own (made by who writes there); None when
            nothing is written.
        progress: whether to draw progress bars.
        opened: what the evaluation's ``check`` returned.
        storage: how data are reached and read, as in training: arguments of ``open_reader``.
        go_on: called now and then in long work; raises what ends it early.
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

    def models(self, name: str, untrained: str, *, baseline: bool) -> "dict[str, PretrainModel]":
        """Return the trained model by name, and with ``baseline`` the untrained one beside it."""
        return {name: self.model, **({untrained: self.initial()} if baseline else {})}

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the views that the encoder takes."""
        return self.model.encoder.image_size


def evaluation_names() -> list[str]:
    """Return the names of all evaluations, sorted."""
    return sorted(_classes())


def settings_class(name: str) -> type[Settings]:
    """Return the class of the settings of evaluation ``name``, which is not imported.

    Raises:
        UserError: there is no such evaluation; the message names the known ones.
    """
    known = _classes()
    if name not in known:
        raise UserError(f"unknown evaluation '{name}'.{suggestion(name, known)}")
    return known[name]


def default_settings(name: str) -> dict[str, Any]:
    """Return the defaults of the settings of ``name``; a required one has ``MISSING``."""
    return settings_class(name).defaults()


def evaluation_module(name: str) -> ModuleType:
    """Return the module of evaluation ``name``.

    Raises:
        UserError: there is no such evaluation; the message names the known ones.
    """
    settings_class(name)
    with needing("evaluate", f"the evaluation {name}"):
        place = _path(name).relative_to(_ROOT).with_suffix("")
        return import_module(".".join([pospre.evaluation.__name__, *place.parts]))


def figures_of(name: str) -> dict[str, Literal["max", "min"]]:
    """Return the figures of evaluation ``name``, and which value of each is the best."""
    return dict(getattr(evaluation_module(name), "FIGURES", {}))


def check_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of evaluation ``name``: the given ones, typed, and the others' defaults.

    Args:
        name: an evaluation.
        settings: values by key; text stands for the value it spells (``"20"``, ``"true"``,
            ``"null"``).

    Raises:
        UserError: unknown key (with the nearest known one), a value of the wrong type or range, or
            a required setting is not given.
    """
    hints = get_type_hints(settings_class(name), include_extras=True)
    checked = default_settings(name)
    for key, value in settings.items():
        if key not in checked:
            near = suggestion(key, [*checked, *_ELSEWHERE])
            raise UserError(f"{name} has no setting '{key}'.{_ELSEWHERE.get(key, near)}")
        checked[key] = _typed(f"{name}: {key}={value}", hints[key], value)
    for key, value in checked.items():
        if value is MISSING:
            raise UserError(f"{name} needs the setting {key}=…: {_texts(name).get(key, '')}")
    return checked


@contextmanager
def named_in_errors(name: str) -> Iterator[None]:
    """Say in a ``UserError`` of what is done inside that it is about evaluation ``name``."""
    try:
        yield
    except UserError as error:
        raise error.restated(f"{name}: {error}") from error


def evaluate_by_name(name: str, context: Context, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what evaluation ``name`` finds with all of its settings, as ``check_settings`` has."""
    evaluate = evaluation_module(name).evaluate
    with named_in_errors(name):
        results: dict[str, Any] = evaluate(context, settings_class(name)(**settings))
    return results


def _typed(what: str, hint: Any, value: Any) -> Any:
    """Return ``value`` as the type ``hint``; ``what`` names it in the error."""
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    try:
        if not isinstance(value, str):
            found = adapter.validate_python(value, strict=True)
        elif value in ("null", "none", "~"):
            found = adapter.validate_python(None)
        else:
            found = adapter.validate_strings(value)
    except ValidationError as error:
        # A union reports one line per member; the first is the type the setting is about.
        first = error.errors()[0]
        said = "Input should have more values" if first["type"] == "missing" else first["msg"]
        raise UserError(f"{what}: {said}.") from None
    if isinstance(found, float) and not abs(found) < _LARGEST:
        raise UserError(f"{what}: Input should be a number below {_LARGEST:g}.")
    return found


def describe() -> str:
    """Return all evaluations with a sentence each, as the text of a ``--help``."""
    return "\n".join(
        _wrap(name, _docstring(name).partition("\n")[0], 20) for name in evaluation_names()
    )


def describe_one(name: str) -> str:
    """Return what evaluation ``name`` measures and its settings, as the text of its ``--help``."""
    texts = _texts(name)
    lines = [
        _wrap(f"{key}={_default(value)}", texts.get(key, ""), 25)
        for key, value in default_settings(name).items()
    ]
    heading = "settings (key=value, with the defaults):" if lines else "It has no settings."
    return "\n".join([_docstring(name), "", heading, *lines])


@cache
def _classes() -> dict[str, type[Settings]]:
    """Return the classes of settings by evaluation: those with a module of their name."""
    found = {}
    for path in _ROOT.glob("*/settings.py"):
        module = import_module(f"{pospre.evaluation.__name__}.{path.parent.name}.settings")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
                if any(path.parent.rglob(f"{name}.py")):
                    found[name] = kind
    return found


@cache
def _path(name: str) -> Path:
    return next(_ROOT.glob(f"*/**/{name}.py"))


def _docstring(name: str) -> str:
    """Return how the module of an evaluation begins; importing it would take seconds."""
    return _path(name).read_text(encoding="utf-8").split('"""')[1].strip()


def _texts(name: str) -> dict[str, str]:
    """Return what is said about every setting."""
    bases = reversed(settings_class(name).__mro__[:-1])
    return {key: text for base in bases for key, text in _told(base).items()}


def _told(base: type) -> dict[str, str]:
    return argument_texts(inspect.cleandoc(base.__doc__ or ""))


def _wrap(label: str, text: str, width: int) -> str:
    """Return ``label`` and what it means, in two columns."""
    first, others = f"  {label:{width}} ", " " * (width + 3)
    return textwrap.fill(text, 98, initial_indent=first, subsequent_indent=others)


def _default(value: Any) -> str:
    return "… (required)" if value is MISSING else spelled(value)
