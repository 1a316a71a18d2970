"""The typed recipe: all keys with their defaults, and errors that name the key.

Sections hold constructor arguments under the same names. ``pospre.arguments.check_arguments``
compares algorithms' options with their constructors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from pospre.arguments import Section, validated
from pospre.data.stores.description import TrainedOn
from pospre.errors import UserError, suggestion
from pospre.recipe import yaml_text
from pospre.recipe.files import find_recipe, read_recipe
from pospre.recipe.inputs import Data, Encoder, Reference
from pospre.recipe.monitoring import Callbacks, Loggers, Verdict
from pospre.recipe.provenance import Taken, taken, with_references
from pospre.recipe.sections import Lora, Optimizer, Schedule, Stage, Trainer
from pospre.recipe.values import Arguments


class Recipe(Section):
    """All options of a run; ``dump`` returns them as plain values."""

    run_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of all random choices: weights, order, crops, masks."""
    data: Data
    """The images, and the groups of views cropped from each."""
    encoder: Encoder
    """The encoder, and the weights to start from."""
    reference: Reference | None = None
    """A second encoder of published weights, which never changes; null: none."""
    algorithms: dict[str, Arguments] = Field(min_length=1)
    """Options of each algorithm by its name; see ``--options NAME``."""
    optimizer: Optimizer = Optimizer()
    """The optimiser and its rates."""
    schedule: Schedule = Schedule()
    """The rate per step."""
    lora: Lora | None = None
    """Low-rank pairs beside frozen weights of blocks (LoRA); null: none."""
    stages: Annotated[tuple[Stage, ...], Field(strict=False)] = ()
    """Parts of the run that train different tensors, in order."""
    trainer: Trainer
    """Duration, device, speed, and output of the training."""
    callbacks: Callbacks = Callbacks()
    """Monitoring of the run."""
    loggers: Loggers = Loggers()
    """Logging besides ``metrics.jsonl``."""
    evaluation: dict[str, Arguments] = Field(default={})
    """Settings of each evaluation by its name; see ``python -m pospre.evaluate --help``."""
    verdict: Verdict | None = None
    """Whether training improved on the weights it started from; null: not asked."""
    _taken: dict[str, Taken] = PrivateAttr(default_factory=dict)
    _trained_on: TrainedOn = PrivateAttr(TrainedOn())
    _as_trained: "Recipe | None" = PrivateAttr(None)

    @property
    def trained_on(self) -> TrainedOn:
        """The training data, as far as ``resolve`` or a checkpoint has told.

        It is no key: the names of ImageNet-21k's classes are longer than a recipe may be.
        """
        return self._trained_on

    def with_training_data(self, data: TrainedOn) -> "Recipe":
        """Return a copy that knows its training data."""
        copy = self.model_copy()
        copy._trained_on = data
        return copy

    @property
    def as_trained(self) -> "Recipe":
        """The recipe of the training, which may have had LoRA's pairs or fading positions."""
        return self._as_trained or self

    def without_pairs(self) -> "Recipe":
        """Return a copy for weights that LoRA's pairs are merged into."""
        copy = self.model_copy(update={"lora": None})
        copy._as_trained = self
        return copy

    def with_encoder(self, encoder: Encoder) -> "Recipe":
        """Return a copy with another encoder."""
        return self.model_copy(update={"encoder": encoder})

    def in_stage(self, number: int) -> "Recipe":
        """Return the recipe with the sizes of views that a stage has.

        The group ``view`` has the encoder's own grid, for methods that predict its patches.
        """
        sizes = self.stages[number].sizes if self.stages else {}
        if not sizes:
            return self
        for name in sizes:
            if name not in self.data.views:
                raise UserError(
                    f"stages.{number}.sizes.{name}: data.views has {', '.join(self.data.views)}. "
                    "Name one of them"
                )
        own = self.encoder.image_size
        views = {
            name: view.model_copy(update={"size": sizes.get(name, view.size or own)})
            for name, view in self.data.views.items()
        }
        grown = self.with_encoder(
            self.encoder.model_copy(update={"image_size": sizes.get("view", own)})
        )
        return grown.model_copy(update={"data": self.data.model_copy(update={"views": views})})

    @property
    def environment(self) -> dict[str, Taken]:
        """Values from environment variables, by dotted key."""
        return self._taken

    @property
    def class_names(self) -> list[str]:
        """Names of algorithms and position schemes, which may be classes of other packages."""
        encoder = self.encoder
        schemes = (each for each in (encoder.positions, encoder.fades_from) if each is not None)
        return [*self.algorithms, *(name for scheme in schemes for name in _names(scheme))]

    def dump(self) -> dict[str, Any]:
        """Return the recipe with all defaults as dicts, lists, strings, numbers, bools and None."""
        return self.model_dump(mode="json")

    def record(self) -> dict[str, Any]:
        """Return the recorded form: ``dump`` with references for possible secrets."""
        recorded: dict[str, Any] = with_references(self.dump(), self._taken)
        return recorded

    def with_places_of(self, other: "Recipe") -> "Recipe":
        """Return a recorded recipe with the data paths of ``other``."""
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
        """Return the folder of the latest checkpoints on this machine, even with a bucket."""
        folder = self.checkpoint_folder()
        return self.run_path() / "checkpoints" if folder.startswith("s3://") else Path(folder)


def _names(positions: Any) -> Iterator[str]:
    """Yield the names of schemes; one may have another as an option."""
    if isinstance(positions, str):
        yield positions
    elif isinstance(positions, Mapping):
        for name, options in positions.items():
            yield name
            yield from _names(options)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe in a YAML file; ``overrides`` are ``key.sub=value`` strings.

    The file may contain ``extends: other.yaml`` and only state the differences. Instead of a path,
    it may be the name of a recipe that comes with pospre: see ``find_recipe``.
    """
    path = find_recipe(path)
    data = read_recipe(path)
    overrides = list(overrides)
    _refuse_new_names(data, overrides)
    yaml_text.apply_overrides(data, overrides)
    optional = {
        key
        for key, one in Recipe.model_fields.items()
        if isinstance(one.default, Section | dict | tuple)
    }
    data = {key: part for key, part in data.items() if part is not None or key not in optional}
    data.setdefault("run_name", path.stem)
    return recipe_from_dict(data, source=f"recipe {path}")


def recipe_from_dict(data: dict[str, Any], source: str = "recipe") -> Recipe:
    """Return the recipe in a plain dict; ``source`` names it in errors."""
    filled = yaml_text.resolve_variables(data)
    recipe = validated(Recipe, filled, source)
    recipe._taken = dict(taken(data, filled))
    return recipe


def recorded_recipe(data: dict[str, Any], source: str = "recipe") -> Recipe:
    """Return a recipe recorded by a run; it may be untrusted, so no variable is filled in."""
    return validated(Recipe, data, source)


def _refuse_new_names(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Keep ``algorithms.mae.weight=2`` from adding MAE to a recipe without it."""
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
