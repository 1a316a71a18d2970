"""The typed recipe: what a YAML file may say, with every default, and errors that name the key.

Sections hold constructor arguments spelled the same. Values are checked strictly: an unknown key,
a wrong type or an impossible value is a ``UserError`` that names the dotted key and the remedy.
Algorithms bring their own arguments; ``check_arguments`` compares those with a constructor.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic import ValidationError as PydanticError
from pydantic_core import ErrorDetails, PydanticCustomError

from pospre import yaml_text
from pospre.errors import UserError, suggestion
from pospre.schedules import DURATION


def _duration(text: str) -> str:
    if not DURATION.fullmatch(text):
        raise PydanticCustomError(
            "duration", "Input should be a duration such as 10ep (epochs), 500ba or 100000sp"
        )
    return text


def _positive_duration(text: str) -> str:
    if _duration(text).startswith("0"):
        raise PydanticCustomError("duration", "Input should be longer than nothing")
    return text


def _local_or_s3(address: str) -> str:
    scheme, separator, _ = address.partition("://")
    if separator and scheme != "s3":
        raise PydanticCustomError("address", "Input should be a local folder or s3://bucket/folder")
    return _plain_path(address)


def _plain_path(path: str) -> str:
    # Composer would fill {rank}, {epoch} and so on in, and nothing would be found there again
    if "{" in path or "}" in path:
        raise PydanticCustomError("address", "Input should be a path without '{' and '}'")
    return path


def _beta(pair: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in pair):
        raise PydanticCustomError("pair", "Input should be two numbers from 0 to below 1")
    return pair


def _share(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1] <= 1:
        raise PydanticCustomError("pair", "Input should be two numbers with 0 < low <= high <= 1")
    return pair


def _all_or_some(count: int) -> int:
    if count < 1 and count != -1:
        raise PydanticCustomError("count", "Input should be 1 or more, or -1 to keep all")
    return count


Duration = Annotated[str, AfterValidator(_duration)]
PositiveDuration = Annotated[str, AfterValidator(_positive_duration)]
Pair = Annotated[tuple[float, float], Field(strict=False)]
_WORDING = {
    "model_type": "a section with keys of its own",
    "dict_type": "a section with keys of its own",
    "too_short": "at least one entry",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', a letter or digit first",
}
Arguments = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class Section(BaseModel):
    """A part of the recipe: strict types, no unknown keys, unchangeable once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Data(Section):
    """Where the images are and how they are cropped; the crop's side is ``encoder.image_size``."""

    path: str
    batch_size: int = Field(gt=0, description="samples per step, over all ranks")
    crop_scale: Annotated[Pair, AfterValidator(_share)] = (0.2, 1.0)
    crop_ratio: Pair = (3 / 4, 4 / 3)
    flip_rate: float = Field(default=0.5, ge=0, le=1)
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    num_workers: int | None = Field(default=None, gt=0)


class Encoder(Section):
    """Arguments of ``pospre.nn.encoder.build_encoder``."""

    name: str
    image_size: int = Field(default=224, gt=0)
    patch_size: int | None = Field(default=None, gt=0)
    depth: int | None = Field(default=None, gt=0)


class Optimizer(Section):
    """AdamW; the peak learning rate is ``base_lr`` × ``data.batch_size`` / 256."""

    name: Literal["adamw"] = "adamw"
    base_lr: float = Field(default=1.5e-4, gt=0)
    betas: Annotated[Pair, AfterValidator(_beta)] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.05, ge=0)


class Schedule(Section):
    """Linear warm-up from 0, then half a cosine down to ``min_lr``, both per step."""

    name: Literal["cosine"] = "cosine"
    warmup: Duration = "10ep"
    min_lr: float = Field(default=0.0, ge=0)


class Fsdp(Section):
    """Options of FSDP2; checkpoints stay single files, whatever the number of ranks."""

    reshard_after_forward: bool = True
    mixed_precision: Literal["DEFAULT", "PURE", "FULL"] = "DEFAULT"


class ClipGrad(Section):
    """Gradient clipping: ``norm`` over all parameters, or ``per_tensor`` as DropPos's code does."""

    mode: Literal["norm", "per_tensor"] = "norm"
    threshold: float = Field(gt=0)


class Trainer(Section):
    """How long, on what, how fast, and where the results go."""

    max_duration: PositiveDuration
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = "fp32"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    run_folder: Annotated[str, AfterValidator(_plain_path)] = "runs"
    overwrite: bool = False
    save_folder: Annotated[str, AfterValidator(_local_or_s3)] | None = None
    save_interval: PositiveDuration = "1ep"
    keep_checkpoints: Annotated[int, AfterValidator(_all_or_some)] = Field(
        default=3, description="local files kept; -1 keeps all"
    )
    autoresume: bool = True
    microbatch_size: int | None = Field(default=None, gt=0)
    compile: bool = False
    fsdp: Fsdp | None = None
    clip_grad: ClipGrad | None = None
    log_interval: int = Field(default=10, gt=0, description="steps between lines of metrics.jsonl")
    progress_bar: bool = True
    dist_timeout: float = Field(default=300.0, gt=0)


class TensorBoard(Section):
    """TensorBoard event files in ``<run folder>/tensorboard``."""


class Loggers(Section):
    """Where to log besides ``metrics.jsonl``."""

    tensorboard: Annotated[TensorBoard | None, Field()] = None


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
    loggers: Loggers = Loggers()
    evaluation: dict[str, Arguments] = {}

    def dump(self) -> dict[str, Any]:
        """Return the recipe with all defaults as dicts, lists, strings, numbers, bools and None."""
        return self.model_dump(mode="json")

    def run_path(self) -> Path:
        """Return this run's folder."""
        return Path(self.trainer.run_folder) / self.run_name

    def checkpoint_folder(self) -> str:
        """Return where checkpoints go: a local path or an ``s3://`` address."""
        return self.trainer.save_folder or str(self.run_path() / "checkpoints")


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe in a YAML file; ``overrides`` are ``key.sub=value`` strings."""
    path = Path(path)
    data = yaml_text.read_mapping(path)
    overrides = list(overrides)
    _refuse_new_names(data, overrides)
    yaml_text.apply_overrides(data, overrides)
    data.setdefault("run_name", path.stem)
    return recipe_from_dict(data, source=f"recipe {path}")


def recipe_from_dict(data: dict[str, Any], source: str = "recipe") -> Recipe:
    """Return the recipe in a plain dict; ``source`` names it in errors."""
    return _validate(Recipe, yaml_text.resolve_variables(data), source, prefix="")


def check_arguments(
    key: str, constructor: Callable[..., Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Return ``given`` checked against a constructor's signature, with its defaults filled in.

    Args:
        key: the recipe's dotted key of these arguments, for errors.
        constructor: a class or function whose arguments are annotated.
        given: keyword arguments.

    Raises:
        UserError: an argument is unknown, missing or of a wrong type.
    """
    target = constructor.__init__ if inspect.isclass(constructor) else constructor
    hints = get_type_hints(target)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        fields[name] = (_lenient(hints[name]), ... if required else parameter.default)
    model = create_model(f"{key} arguments", __base__=Section, **fields)
    checked = _validate(model, given, "recipe", prefix=f"{key}.")
    return {name: getattr(checked, name) for name in fields}


def _lenient(hint: Any) -> Any:
    """Return a hint that takes a YAML list where the constructor wants a tuple."""
    return (
        Annotated[hint, Field(strict=False)] if getattr(hint, "__origin__", None) is tuple else hint
    )


def _refuse_new_names(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Stop ``algorithms.mae.weight=2`` from adding MAE to a recipe that has none."""
    known = {section: set(data.get(section) or {}) for section in ("algorithms", "evaluation")}
    for item in overrides:
        section, *rest = item.partition("=")[0].split(".")
        if section not in known or not rest:
            continue
        if len(rest) > 1 and rest[0] not in known[section]:
            raise UserError(
                f"override {item}: the recipe has no {section}.{rest[0]} (to add it: "
                f"{section}.{rest[0]}={{}}).{suggestion(rest[0], known[section])}"
            )
        known[section].add(rest[0])


def _validate(model: type[Any], data: dict[str, Any], source: str, prefix: str) -> Any:
    try:
        return model.model_validate(data)
    except PydanticError as error:
        # An unknown key comes first: it is often the cause of the missing one.
        details = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        lines = [_explain(model, data, item, prefix) for item in details]
        raise UserError(f"{source}: " + "\n  also: ".join(lines)) from None


def _explain(model: type[BaseModel], data: dict[str, Any], error: ErrorDetails, prefix: str) -> str:
    """Return one sentence for one of pydantic's errors."""
    if error["type"] in ("extra_forbidden", "missing"):
        key = prefix + ".".join(str(part) for part in error["loc"])
        if error["type"] == "missing":
            return f"key '{key}' is missing"
        known = _fields_at(model, error["loc"][:-1])
        return f"unknown key '{key}'.{suggestion(str(error['loc'][-1]), known)}"
    key = prefix + ".".join(_present(data, error["loc"]))
    value = error["input"]
    wanted = _WORDING.get(error["type"], error["msg"].replace("Input should be ", ""))
    return f"key '{key}' is {value!r} ({type(value).__name__}); expected {wanted}"


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
        hint = model.model_fields[str(part)].annotation
        members = [hint, *get_args(hint)]
        model = next(m for m in members if inspect.isclass(m) and issubclass(m, BaseModel))
    return list(model.model_fields)
