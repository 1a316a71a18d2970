"""What a checkpoint records of its run, the check that this start is that run, and the loading."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from torch import Tensor

from pospre.data.loader import ViewLoader
from pospre.data.stores.description import Identity, difference, first_other
from pospre.errors import UserError
from pospre.model.algorithm import pretrain_model
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.recipe.provenance import COMPARED, fingerprint
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.content import callback_states
from pospre.run.checkpoints.files import warn_of_other_versions
from pospre.run.checkpoints.reading import Checkpoint
from pospre.run.same_recipe import compare_recipes


class Recorded(NamedTuple):
    """The record of its run in every checkpoint."""

    recipe: dict[str, Any]  # resolved
    num_samples: int
    data: Identity
    # of values from the environment that a resumed run must not change
    fingerprints: dict[str, str]
    classes: list[str] | None  # names by label
    starts: list[int]  # first steps of the stages that the run has entered
    fresh: list[str]  # with stages, tensors of the encoder that the start did not give
    reference: str | None  # SHA-256 of its tensors


class RecipeRecord(Callback):
    """Stores the resolved recipe, the data set's identity and its classes in every checkpoint.

    ``step`` is the one that the run begins at, which says what stages it has entered.
    """

    def __init__(
        self,
        recipe: Recipe,
        loader: ViewLoader,
        reference: str | None,
        stages: Stages | None = None,
        step: int = 0,
    ) -> None:
        fingerprints = {
            key: fingerprint(recipe.run_name, key, recipe.environment[key].value)
            for key in COMPARED
            if key in recipe.environment
        }
        self._record = Recorded(
            recipe.record(),
            loader.num_samples,
            loader.identity,
            fingerprints,
            loader.classes,
            [] if stages is None else stages.starts[: stages.at(step) + 1],
            [] if stages is None else stages.fresh,
            reference,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the stored record."""
        return self._record._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the recipe of this start, which was compared with the checkpoint's before."""


def recorded(content: dict[str, Any]) -> Recorded:
    """Return the record of its run in a checkpoint's content."""
    return Recorded(**callback_states(content)["RecipeRecord"])


class Training(Protocol):
    """The parts of a training, as ``training.build`` makes them."""

    @property
    def recipe(self) -> Recipe:
        """Resolved, including what the data decide."""

    @property
    def loader(self) -> ViewLoader:
        """Of the training data."""

    @property
    def model(self) -> PretrainModel:
        """With the weights from which it would start."""

    @property
    def total_steps(self) -> int:
        """Of the whole training."""

    @property
    def stages(self) -> Stages | None:
        """As if it began; None: one for everything."""


def check_checkpoint(start: Checkpoint, training: Training) -> None:
    """Raise a ``UserError`` if this training cannot resume from a checkpoint."""
    recipe, loader = training.recipe, training.loader
    if not recipe.trainer.autoresume:
        raise UserError(
            f"{start.uri} exists and trainer.autoresume is false; use trainer.autoresume=true to "
            "resume, trainer.overwrite=true to start again, or another run_name"
        )
    before = recorded(start.content)
    if start.batch > training.total_steps:
        raise UserError(
            f"trainer.max_duration = {recipe.trainer.max_duration} is {training.total_steps} "
            f"steps, but {start.uri} is trained for {start.batch}; give at least {start.batch}ba, "
            "or choose another run_name"
        )
    compare_recipes(before.recipe, recipe, start.uri, before.fingerprints)
    _check_stages(training, before, start.batch)
    if before.num_samples != loader.num_samples:
        raise UserError(
            f"{start.uri} was trained on {before.num_samples} images, but data.path = "
            f"{recipe.data.path} holds {loader.num_samples}; choose another run_name"
        )
    other = difference(before.data, loader.identity)
    if before.classes and loader.classes and before.classes != loader.classes:
        other = (
            f"the classes differ (first difference: {first_other(before.classes, loader.classes)})"
        )
    if other:
        raise UserError(
            f"{start.uri} was trained on other data ({before.recipe['data']['path']}) than "
            f"data.path = {recipe.data.path} holds: {other}. Give the data that the run began "
            "with, or choose another run_name"
        )
    now, reference = reference_hash(training.model), recipe.reference
    if before.reference != now:
        address = None if reference is None else reference.weights
        raise UserError(
            f"{start.uri} was trained with another reference: the hash of its tensors was "
            f"{before.reference}, that of reference.weights = {address} is {now}. Give the weights "
            "that the run began with, or choose another run_name"
        )
    weights: dict[str, Tensor] = start.content["state"]["model"]
    compare_tensors(training.model.state_dict(), weights, start.uri)
    warn_of_other_versions(start.content, start.uri)


def _check_stages(training: Training, before: Recorded, step: int) -> None:
    """Raise a ``UserError`` if ended stages had other ends, or the current one would have ended."""
    if training.stages is None:
        return
    pairs = zip(before.starts[1:], before.recipe["stages"], training.recipe.stages, strict=False)
    for number, (end, old, now) in enumerate(pairs):
        if old["until"] != now.until:
            raise UserError(
                f"stages.{number}.until was {old['until']}, is {now.until}, but that stage has "
                f"ended at step {end}. Give {old['until']} to resume, or choose another run_name"
            )
    training.stages.resumed(before.starts, before.fresh, step)


def reference_hash(model: PretrainModel) -> str | None:
    """Return the hash of a model's reference, if it has one."""
    return None if model.reference is None else model.reference.sha256


def compare_tensors(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], name: str
) -> None:
    """Raise a ``UserError`` that names the first tensor of ``actual`` that does not fit."""
    for key, tensor in expected.items():
        if key not in actual:
            raise UserError(f"{name} is of another model: it lacks the tensor '{key}'")
        if actual[key].shape != tensor.shape:
            raise UserError(
                f"{name} is of another model: tensor '{key}' has shape "
                f"{tuple(actual[key].shape)}, the recipe's model wants {tuple(tensor.shape)}"
            )
    for key in actual:
        if key not in expected:
            raise UserError(
                f"{name} is of another model: its tensor '{key}' is not in the recipe's model"
            )


class Resume(Callback):
    """Loads the state and the random state at the moment when Composer would read a file.

    Composer's ``load_path`` reads the file a second time and unpickles without limits. The
    ``content`` is emptied after loading, to free its memory. ``entering`` are tensors that train
    from this step on: they have no moments yet.
    """

    def __init__(self, content: dict[str, Any], entering: Collection[str] = ()) -> None:
        self._content = content
        self._entering = entering
        self._random: list[dict[str, Any]] | None = content.get("rng")

    def before_load(self, state: State, logger: Logger) -> None:
        """Load the weights, the optimiser, the clock and the rest of the state."""
        saved = self._content["state"]
        # What a file says of algorithms Composer would evaluate, as Python, were it a list (also
        # one under the old name, with an underscore); ours come from the recipe.
        for key in [key for key in saved if key.startswith("_")]:
            del saved[key]
        saved["algorithms"] = dict(saved["algorithms"])
        states = saved.setdefault("callbacks", {})
        for callback in state.callbacks:  # of one that this start adds nothing is missing
            if not callback.state_dict():
                states.setdefault(type(callback).__qualname__, {})
        for algorithm in state.algorithms:  # none keeps anything that would be read
            saved["algorithms"].setdefault(type(algorithm).__qualname__, {})
        model = pretrain_model(state)
        entering = [p for name, p in model.named_parameters() if name in self._entering]
        try:
            # torch wants moments of all tensors that are not frozen, and drops those of frozen ones
            for parameter in entering:
                parameter.requires_grad_(False)
            state.load_state_dict(saved, logger, strict=True)
            for parameter in entering:
                parameter.requires_grad_(True)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                "the checkpoint that this run resumes from holds a state that is not valid "
                f"({type(error).__name__}: {error}); delete it to resume from an older one"
            ) from error
        saved.clear()
        self._content.clear()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Restore the random state before the first step, also in the middle of an epoch."""
        if self._random is not None:
            # those of ranks that there are no more would only make Composer warn
            reproducibility.load_rng_state(self._random[: dist.get_world_size()])
            self._random = None
