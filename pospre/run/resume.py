"""What a checkpoint records of its run, and how a run resumes from it."""

from typing import Any, NamedTuple

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility

from pospre.data.loader import ViewLoader
from pospre.data.stores.description import Identity
from pospre.errors import UserError
from pospre.recipe.provenance import COMPARED, fingerprint
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.content import callback_states


class RecipeRecord(Callback):
    """Stores the resolved recipe and the identity of the data set in every checkpoint.

    Values from the environment that a resumed run must not change are stored as fingerprints.
    """

    def __init__(self, recipe: Recipe, num_samples: int, data: Identity) -> None:
        self.num_samples = num_samples
        self.data = data
        self.recipe = recipe.record()
        self.fingerprints = {
            key: fingerprint(recipe.run_name, key, recipe.environment[key].value)
            for key in COMPARED
            if key in recipe.environment
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is stored."""
        return {
            "recipe": self.recipe,
            "num_samples": self.num_samples,
            "data": self.data,
            "fingerprints": self.fingerprints,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the recipe of this start, which was compared with the checkpoint's before."""


class Recorded(NamedTuple):
    """What ``RecipeRecord`` has stored in a checkpoint."""

    recipe: dict[str, Any]
    num_samples: int
    data: Identity
    fingerprints: dict[str, str]


def recorded(content: dict[str, Any]) -> Recorded:
    """Return what a checkpoint's content records of its run."""
    return Recorded(**callback_states(content)["RecipeRecord"])


class LoaderPosition(Callback):
    """Keeps the loader at the run's position: resuming neither replays nor skips a sample."""

    def __init__(self, loader: ViewLoader) -> None:
        self.loader = loader
        self._bad: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of samples needs if the data set is stored elsewhere."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that order if this storage has another."""
        if state:
            self.loader.load_state_dict(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Go to the sample after the last one trained; Composer must not replay those before."""
        time = state.timestamp
        samples = time.sample_in_epoch.value
        self.loader.load_state_dict({"epoch": time.epoch.value, "samples": samples})
        state.dataset_resumption["train"] = True

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Go to the start of the epoch."""
        self.loader.load_state_dict({"epoch": state.timestamp.epoch.value, "samples": 0})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log how many samples were left out since the start, as soon as there is one.

        They are counted over all ranks at the end of every epoch and of the run. In between, a
        rank adds the samples that it met itself.
        """
        if not self.loader.skips_bad:
            return
        self._bad.update(list(self.loader.bad))
        time = state.timestamp
        done = state.max_duration is not None and time >= state.max_duration
        if dist.get_world_size() > 1 and (done or time.batch_in_epoch == len(self.loader)):
            self._bad.update(*dist.all_gather_object(self._bad))
        if self._bad:
            logger.log_metrics({"data/bad_samples": len(self._bad)})


class Resume(Callback):
    """Loads the state and the random state at the moment when Composer would read a file.

    Composer's ``load_path`` reads the file a second time and unpickles without limits. The
    ``content`` is emptied after loading, to free its memory.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._random: list[dict[str, Any]] | None = content.get("rng")

    def before_load(self, state: State, logger: Logger) -> None:
        """Load the weights, the optimiser, the clock and the rest of the state."""
        saved = self._content["state"]
        # What a file says of algorithms Composer would evaluate, as Python, were it a list (also
        # one under the old name, with an underscore); ours come from the recipe.
        for key in [key for key in saved if key.startswith("_")]:
            del saved[key]
        saved["algorithms"] = dict(saved.get("algorithms", {}))
        states = saved.setdefault("callbacks", {})
        for callback in state.callbacks:  # of one that this start adds nothing is missing
            if not callback.state_dict():
                states.setdefault(type(callback).__qualname__, {})
        for algorithm in state.algorithms:  # none keeps anything that would be read
            saved["algorithms"].setdefault(type(algorithm).__qualname__, {})
        try:
            state.load_state_dict(saved, logger, strict=True)
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
