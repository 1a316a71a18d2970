"""The typed recipe: what a YAML file may say, with every default, and errors that name the key.

Sections hold constructor arguments spelled the same. Values are checked strictly: an unknown key,
a wrong type or an impossible value is a ``UserError`` that names the dotted key and the remedy.
Algorithms bring their own arguments; ``check_arguments`` compares those with a constructor.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, PrivateAttr, create_model
from pydantic import ValidationError as PydanticError
from pydantic_core import ErrorDetails

from pospre.errors import UserError, suggestion
from pospre.recipe import yaml_text
from pospre.recipe.data_section import Data
from pospre.recipe.environment import Taken, taken, with_references
from pospre.recipe.extends import read_recipe
from pospre.recipe.find import find_recipe
from pospre.recipe.renamed import REMOVED, new_name, with_new_names, without_old_defaults
from pospre.recipe.sections import (
    Callbacks,
    Encoder,
    Loggers,
    Optimizer,
    Schedule,
    Section,
    Trainer,
)
from pospre.recipe.values import Arguments

_WORDING = {
    "dict_type": "a section with keys of its own, {} for none",
    "tuple_type": "a list, in brackets",
    "too_short": "at least one entry",
    "too_long": "at most {max_length} entries",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', a letter or digit first",
}


_SECTIONS: dict[str, type[Section]] = {
    "data": Data,
    "encoder": Encoder,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "trainer": Trainer,
    "callbacks": Callbacks,
}


class Recipe(Section):
    """Everything that makes a run; ``dump`` gives it back as plain values."""

    run_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0, lt=2**32)
    data: Data
    encoder: Encoder
    algorithms: dict[str, Arguments] = Field(min_length=1)
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    trainer: Trainer
    callbacks: Callbacks = Callbacks()
    loggers: Loggers = Loggers()
    evaluation: dict[str, Arguments] = Field(default={})
    _taken: dict[str, Taken] = PrivateAttr(default_factory=dict)

    @property
    def environment(self) -> dict[str, Taken]:
        """What variables of the environment gave, by dotted key."""
        return self._taken

    def dump(self) -> dict[str, Any]:
        """Return the recipe with all defaults as dicts, lists, strings, numbers, bools and None."""
        return self.model_dump(mode="json")

    def record(self) -> dict[str, Any]:
        """Return what is written down: ``dump`` with references for what may hold secrets."""
        recorded: dict[str, Any] = with_references(self.dump(), self._taken)
        return recorded

    def with_places_of(self, other: "Recipe") -> "Recipe":
        """Return a recorded recipe with the places of the data that ``other`` has."""
        places = {key: getattr(other.data, key) for key in ("path", "labels", "cache_dir")}
        placed = self.model_copy(update={"data": self.data.model_copy(update=places)})
        placed._taken = other._taken
        return placed

    def run_path(self) -> Path:
        """Return this run's folder."""
        return Path(self.trainer.run_folder) / self.run_name

    def checkpoint_folder(self) -> str:
        """Return where checkpoints go: a local path or an ``s3://`` address."""
        return self.trainer.save_folder or str(self.run_path() / "checkpoints")

    def local_checkpoints(self) -> Path:
        """Return where the last checkpoints are on this machine, also those of a bucket."""
        folder = self.checkpoint_folder()
        return self.run_path() / "checkpoints" if folder.startswith("s3://") else Path(folder)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe in a YAML file; ``overrides`` are ``key.sub=value`` strings.

    The file may say ``extends: other.yaml`` and then only what differs from that one. Instead of a
    path, the name of a recipe that comes with pospre will do: see ``find_recipe``.
    """
    path = find_recipe(path)
    data = read_recipe(path)
    overrides = list(overrides)
    _refuse_new_names(data, overrides)
    yaml_text.apply_overrides(data, overrides)
    data.setdefault("run_name", path.stem)
    return recipe_from_dict(data, source=f"recipe {path}")


def recipe_from_dict(data: dict[str, Any], source: str = "recipe") -> Recipe:
    """Return the recipe in a plain dict; ``source`` names it in errors."""
    filled = yaml_text.resolve_variables(data)
    recipe: Recipe = _validate(Recipe, without_old_defaults(filled), source, prefix="")
    recipe._taken = dict(taken(data, filled))
    return recipe


def recorded_recipe(data: dict[str, Any], source: str = "recipe") -> Recipe:
    """Return a recipe that a run recorded, also where keys of it were renamed since.

    It may be anyone's: no variable of the environment is filled in.
    """
    recipe: Recipe = _validate(Recipe, with_new_names(data), source, prefix="")
    return recipe


def check_arguments(
    key: str, constructor: Callable[..., Any], given: dict[str, Any], source: str = "recipe"
) -> dict[str, Any]:
    """Return ``given`` checked against a constructor's signature, with its defaults filled in.

    Args:
        key: the recipe's dotted key of these arguments, for errors.
        constructor: a class or function whose arguments are annotated, ranges too.
        given: keyword arguments.
        source: where they come from, for errors.

    Raises:
        UserError: an argument is unknown, missing, of a wrong type or out of its range.
    """
    target = constructor.__init__ if inspect.isclass(constructor) else constructor
    hints = get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # a class without a constructor of its own takes nothing
        required = parameter.default is inspect.Parameter.empty
        hint = _lenient(hints.get(name, Any))  # a class outside may leave it open
        fields[name] = (hint, ... if required else parameter.default)
    model = create_model(f"{key} arguments", __base__=Section, **fields)
    checked = _validate(model, given, source, prefix=f"{key}.")
    return {name: getattr(checked, name) for name in fields}


def _lenient(hint: Any) -> Any:
    """Return a hint that takes a YAML list where the constructor wants a tuple."""
    if isinstance(hint, UnionType):
        return reduce(or_, map(_lenient, get_args(hint)))
    return Annotated[hint, Field(strict=False)] if get_origin(hint) is tuple else hint


def _refuse_new_names(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Stop ``algorithms.mae.weight=2`` from adding MAE to a recipe that has none."""
    given = data.get("algorithms")
    known = set(given) if isinstance(given, dict) else set()
    for item in overrides:
        section, *rest = yaml_text.key_parts(item.partition("=")[0])
        if section != "algorithms" or not rest:
            continue
        if len(rest) > 1 and known and rest[0] not in known:
            raise UserError(
                f"override {item}: the recipe has no algorithms.{rest[0]} (to add it: "
                f"algorithms.{rest[0]}={{}}).{suggestion(rest[0], known)}"
            )
        known.add(rest[0])


def _validate(model: type[Any], data: dict[str, Any], source: str, prefix: str) -> Any:
    try:
        return model.model_validate(data)
    except PydanticError as error:
        # An unknown key comes first: it is often the cause of the missing one.
        details = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        lines = [_explain(model, data, item, prefix) for item in _likely(data, details)]
        raise UserError(f"{source}: " + "\n  also: ".join(dict.fromkeys(lines))) from None


def _likely(data: dict[str, Any], errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those of a union's member that the value cannot be meant for.

    A key that takes a number or a list of two is told what is wrong with the number, or the list.
    """

    def is_foreign(error: ErrorDetails) -> bool:
        is_list = isinstance(error["input"], list | tuple)
        return error["type"] in (("int_type", "float_type") if is_list else ("tuple_type",))

    meant = [_present(data, error["loc"]) for error in errors if not is_foreign(error)]
    return [
        error
        for error in errors
        if not is_foreign(error)
        or (key := _present(data, error["loc"])) not in [other[: len(key)] for other in meant]
    ]


def _explain(model: type[BaseModel], data: dict[str, Any], error: ErrorDetails, prefix: str) -> str:
    """Return one sentence for one of pydantic's errors."""
    last = error["loc"][-1]
    if error["type"] in ("extra_forbidden", "missing") and isinstance(last, str):
        key = prefix + ".".join(str(part) for part in error["loc"])
        if error["type"] == "missing":
            return f"key '{key}' is missing"
        if renamed := new_name(key):
            return f"key '{key}' is called '{renamed}' now; rename it"
        if key in REMOVED:
            return f"key '{key}' is gone; {REMOVED[key][1]}"
        elsewhere = [f"{s}.{last}" for s, hint in _SECTIONS.items() if last in hint.model_fields]
        if elsewhere and key == last:
            return f"unknown key '{key}'. Did you mean '{elsewhere[0]}'?"
        return f"unknown key '{key}'.{suggestion(last, _fields_at(model, error['loc'][:-1]))}"
    key = prefix + ".".join(_present(data, error["loc"]))
    value = error["input"]
    wanted = _wanted(model, error)
    if value is None:
        return f"key '{key}' is empty (None); expected {wanted}"
    if error["type"] == "string_type" and isinstance(value, int | float):
        wanted = f"text: put it in quotes, as {key}='\"{value}\"' on the command line"
    return f"key '{key}' is {value!r} ({type(value).__name__}); expected {wanted}"


def _wanted(model: type[BaseModel], error: ErrorDetails) -> str:
    """Return what should stand in the place of the value that an error is about."""
    kind, value = error["type"], error["input"]
    if kind == "model_type":
        fields = _fields_at(model, error["loc"])
        return f"a section with keys of its own: {', '.join(fields) or '{}'}"
    if kind == "dict_type" and isinstance(value, str):
        return f"a section with keys of its own, such as {{{value}: {{}}}}"
    if kind == "missing":  # of a list
        return "more entries"
    words = _WORDING.get(kind, error["msg"].replace("Input should be ", ""))
    return words.format(**error.get("ctx", {})) if kind == "too_long" else words


def _present(data: Any, loc: tuple[int | str, ...]) -> list[str]:
    """Return the parts of ``loc`` that exist in ``data`` (pydantic also names union members)."""
    parts = []
    for part in loc:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            break
        parts.append(str(part))
    return parts


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the section at ``loc``."""
    for part in loc:
        if str(part) not in model.model_fields:
            continue  # a name of the user's own, such as that of a view group
        hint = model.model_fields[str(part)].annotation
        members = [hint, *get_args(hint)]
        model = next(m for m in members if inspect.isclass(m) and issubclass(m, BaseModel))
    return list(model.model_fields)
