"""Arguments and sections of a recipe, checked against the annotations that declare them.

An unknown key, a wrong type or an impossible value is a ``UserError`` that names the dotted key and
the remedy.
"""

import inspect
import textwrap
from collections.abc import Callable, Container, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, reduce, wraps
from inspect import getdoc, signature
from operator import or_
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, validate_call
from pydantic_core import ErrorDetails

from pospre.docstrings import meanings
from pospre.errors import UserError, suggestion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LONGEST = 80  # characters of quoted values: a whole model fills screens
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

_OURS = {  # by the names that other libraries use
    "lr": "base_lr",
    "learning_rate": "base_lr",
    "wd": "weight_decay",
    "epochs": "max_duration",
    "workers": "num_workers",
    "img_size": "image_size",
    "in_chans": "channels",
}

P = ParamSpec("P")
Result = TypeVar("Result")
Options = TypeVar("Options")
Checked = TypeVar("Checked", bound=BaseModel)


def typed(function: Callable[P, Result], name: str = "") -> Callable[P, Result]:
    """Raise ``UserError`` if an argument of a function or dataclass does not fit its annotation.

    ``name`` is that of the function in errors, if not its own.
    """
    target: Any = function
    arguments = target.__init__ if is_dataclass(target) else target  # type: ignore[misc]

    @cache  # built on the first call: annotations may name classes defined below
    def checked() -> Callable[P, Result]:
        config = ConfigDict(arbitrary_types_allowed=True)
        checking: Any = validate_call(config=config)(arguments)
        if arguments is target:
            return cast(Callable[P, Result], checking)

        def make(*args: P.args, **kwargs: P.kwargs) -> Result:
            made: Result = target.__new__(target)
            checking(made, *args, **kwargs)
            return made

        return make

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return checked()(*args, **kwargs)
        except ValidationError as error:
            first = error.errors()[0]
            loc = first["loc"][0]
            key = loc if isinstance(loc, str) else [*signature(arguments).parameters][loc]
            given = repr(first["input"])
            if len(given) > _LONGEST:
                given = f"of type {type(first['input']).__name__}"
            said = f"{key} is {given}: {first['msg']}."
            if first["type"] == "unexpected_keyword_argument":
                said += suggestion(key, signature(function).parameters)
            raise UserError(f"{name or function.__name__}: {said}") from None

    return call


def taking(
    options: Callable[P, Options],
) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Call a function of a dataclass with its fields instead, checked as in ``typed``."""

    def wrap(function: Callable[[Options], Result]) -> Callable[P, Result]:
        made = typed(options, function.__name__)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(made(*args, **kwargs))

        given = signature(function).return_annotation
        vars(call)["__signature__"] = signature(options).replace(return_annotation=given)
        kind = cast(type, options)
        lines = (
            textwrap.fill(f"{name}: {text}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
            for name, text in meanings(kind).items()
        )
        docs = [getdoc(function) or "", "Args:\n" + "\n".join(lines), getdoc(kind) or ""]
        call.__doc__ = "\n\n".join(docs)
        return call

    return wrap


class Section(BaseModel):
    """A section of the recipe: strict types, finite numbers, no unknown keys, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # MLflow has arguments called model_…
    )


def check_arguments(
    key: str, constructor: Callable[..., Any], given: dict[str, Any], source: str = "recipe"
) -> dict[str, Any]:
    """Return ``given`` checked against a constructor's signature, with its defaults filled in.

    A ``UserError`` names ``source``, where they come from. After the dotted ``key`` of these
    arguments in the recipe, it names what is unknown, missing, of a wrong type or out of range.
    """
    model = section_of(constructor)
    checked = validated(model, given, source, prefix=f"{key}." if key else "")
    return {name: getattr(checked, name) for name in model.model_fields}


def check_fields(made: "DataclassInstance", source: str) -> None:
    """Raise ``UserError`` unless a dataclass's fields match their annotations."""
    check_arguments("", type(made), declared(made, type(made)), source)


def declared(given: object, declaration: type["DataclassInstance"]) -> dict[str, Any]:
    """Return the values in ``given`` that are fields of a dataclass, by name."""
    return {field.name: getattr(given, field.name) for field in fields(declaration)}


@cache
def section_of(constructor: Callable[..., Any]) -> type[Section]:
    """Return a section of a constructor's arguments."""
    target = constructor.__init__ if inspect.isclass(constructor) else constructor
    hints = get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in signature(constructor).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # a class without its own constructor takes no arguments
        required = parameter.default is parameter.empty
        hint = _lenient(hints.get(name, Any))  # an outside class may not annotate it
        fields[name] = (hint, ... if required else parameter.default)
    return create_model("Arguments", __base__=Section, **fields)


def _lenient(hint: Any) -> Any:
    """Return a hint that takes a YAML list where the constructor wants a tuple."""
    if isinstance(hint, UnionType):
        return reduce(or_, map(_lenient, get_args(hint)))
    return Annotated[hint, Field(strict=False)] if get_origin(hint) is tuple else hint


def validated(
    model: type[Checked], data: dict[str, Any], source: str, *, prefix: str = ""
) -> Checked:
    """Return the section that ``data`` describes, or raise ``UserError`` about all wrong keys."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # unknown keys first: they often cause the missing ones
        details = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        lines = [_explain(model, data, item, prefix) for item in _likely(data, details)]
        raise UserError(f"{source}: " + "\n  also: ".join(dict.fromkeys(lines))) from None


def _likely(data: dict[str, Any], errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those of union members that the value cannot be meant for.

    If a key takes a number or a list of two, the message names the problem of the number or the
    list.
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
        if ":" in last:
            name, _, value = last.partition(":")
            return f"unknown key '{key}'; a colon needs a space after it: {{{name}: {value}}}"
        ours = _OURS.get(last, last)
        elsewhere = [f"{name}.{ours}" for name, part in _sections(model) if ours in part]
        if elsewhere and key == last:
            return f"unknown key '{key}'. Did you mean '{elsewhere[0]}'?"
        return f"unknown key '{key}'.{suggestion(ours, _fields_at(model, error['loc'][:-1]))}"
    key = prefix + ".".join(_present(data, error["loc"]))
    value = error["input"]
    wanted = _wanted(model, error)
    if value is None:
        return f"key '{key}' is empty (None); expected {wanted}"
    if error["type"] == "string_type" and isinstance(value, int | float):
        wanted = f"text: put it in quotes, as {key}='\"{value}\"' on the command line"
    return f"key '{key}' is {value!r} ({type(value).__name__}); expected {wanted}"


def _wanted(model: type[BaseModel], error: ErrorDetails) -> str:
    """Return a description of the required value."""
    kind, value = error["type"], error["input"]
    if kind == "model_type":
        fields = _fields_at(model, error["loc"])
        return f"a section with these keys: {', '.join(fields) or '{}'}"
    if kind == "dict_type" and isinstance(value, str):
        return f"a section with keys, such as {{{value}: {{}}}}"
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
            continue  # a user's name, such as that of a view group
        hint = model.model_fields[str(part)].annotation
        members = [hint, *get_args(hint)]
        model = next(m for m in members if inspect.isclass(m) and issubclass(m, BaseModel))
    return list(model.model_fields)


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, Container[str]]]:
    """Yield the sections in a section by name, with the names of their fields."""
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation.model_fields
