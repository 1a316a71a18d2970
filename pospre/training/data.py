"""The view groups of a recipe, the loader of its data, and the loader's position in the run."""

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.arguments import declared
from pospre.data.loader import ViewLoader, build_loader
from pospre.data.memory import readable
from pospre.data.opening import open_reader
from pospre.data.reading import Reading, Storage
from pospre.data.stores.image_folder import describe_classes
from pospre.data.stores.reader import Reader
from pospre.data.views.augment_options import check_used
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.object_store import is_remote
from pospre.recipe.recipe import Recipe
from pospre.recipe.yaml_text import VARIABLE, set_variables
from pospre.trust import is_trusted, remedy


def build_data(recipe: Recipe) -> ViewLoader:
    """Return this rank's loader of the recipe's views."""
    world, local = dist.get_world_size(), dist.get_local_world_size()
    loader = build_loader(
        recipe.data.path,
        views=list(build_views(recipe).values()),
        batch_size=rank_batch(recipe, world),
        seed=recipe.seed,
        rank=dist.get_global_rank(),
        world_size=world,
        nodes=world // local if world % local == 0 else world,  # an uneven last one: not known
        pin_memory=recipe.trainer.device != "cpu",
        **{**declared(recipe.data, Reading), **storage(recipe)},
    )
    if loader.reader.features is not None:
        for view in build_views(recipe).values():
            _check_whole(view)
    loader.probe()
    return loader


def _check_whole(view: ViewGroup) -> None:
    """Raise ``UserError`` if a view of features has options for crops of images."""
    for key, used in (
        ("crop", view.crop == "full"),
        ("scale", False),
        ("ratio", False),
        ("interpolation", False),
        ("flip_rate", view.flip_rate == 0),
    ):
        check_used(view, f"data.views.{view.name}.", key, used, "features, which stay whole")


def rank_batch(recipe: Recipe, ranks: int) -> int:
    """Return the samples per step on each of ``ranks`` ranks, which must share the batch evenly."""
    batch = recipe.data.batch_size
    if batch % ranks:
        near = sorted({max(1, batch // ranks), batch // ranks + 1})
        sizes = " or ".join(str(number * ranks) for number in near)
        raise UserError(
            f"data.batch_size = {batch} is the batch over all ranks (GPUs) and must be a multiple "
            f"of their number, {ranks}; use data.batch_size={sizes}, or another number of ranks"
        )
    return batch // ranks


def open_data(recipe: Recipe) -> Reader:
    """Return a reader of the recipe's data."""
    return open_reader(recipe.data.path, **storage(recipe))


_READ = ("data.path", "data.labels", "encoder.weights", "reference.weights")


def check_addresses(recipe: Recipe, *keys: str) -> None:
    """Check that opening what a recipe that may be a stranger's names tells its bucket nothing.

    ``keys`` are what will be opened; none: the data and the weights.

    Raises:
        UserError: a remote address contains the value of an environment variable that is not
            trusted.
    """
    for key in keys or _READ:
        written = recipe.environment[key].written if key in recipe.environment else ""
        names = [name for name in set_variables(written) if not is_trusted(name)]
        if names and is_remote(str(written)):
            raise UserError(
                f"{key} = {written} would send the value of ${names[0]} to that bucket. "
                f"{remedy(names[0])}."
            )


def storage(recipe: Recipe) -> dict[str, Any]:
    """Return the options for accessing and reading the recipe's data and further data."""
    options = declared(recipe.data, Storage)
    if VARIABLE.search(str(options["cache_dir"])):  # a recorded one that the environment gave
        options["cache_dir"] = None
    return {**options, "channels": recipe.encoder.channels}


def build_views(recipe: Recipe) -> dict[str, ViewGroup]:
    """Return the recipe's view groups by name; the default size is the encoder's."""
    size = recipe.encoder.image_size
    views = recipe.data.views.items()
    return {
        name: ViewGroup(name=name, **{**view.model_dump(), "size": view.size or size})
        for name, view in views
    }


def describe_data(loader: ViewLoader) -> str:
    """Return a line about the samples and their classes."""
    reader, named = loader.reader, "no names of classes"
    if reader.classes is not None:
        some = describe_classes(reader.classes, reader.labels())
        named = f"{len(reader.classes)} classes: {some}"
    return f"data: {len(reader)} samples of {reader.address}; {named}"


def describe_data_volume(loader: ViewLoader) -> str | None:
    """Return a line to print at the start; None for local data."""
    if "://" not in loader.reader.address:
        return None
    from pospre.data.bucket.reader import RemoteMdsReader  # boto3 is only for remote data

    reader = loader.reader
    assert isinstance(reader, RemoteMdsReader)
    visits, cached = reader.visits, reader.cached_bytes()
    num_bytes = sum(entry.stored.size for entry in reader.visited)
    node = loader.rank * loader.nodes // loader.world_size + 1
    machine = "this machine" if loader.nodes == 1 else f"machine {node} of {loader.nodes}"
    what = "reads "
    if loader.shard_groups > 1:
        first, last = visits.shard_groups[0] + 1, visits.shard_groups[-1] + 1
        groups = f"shard group {first}" if first == last else f"shard groups {first} to {last}"
        what += f"{groups} of {loader.shard_groups}: "
    here = "all" if cached == num_bytes else readable(cached)
    text = (
        f"{machine} {what}{len(reader.visited)} of {len(reader.parts)} shards in every epoch, "
        f"{readable(num_bytes)}, of which {here if cached else 'none'} is in its cache"
    )
    if not reader.stays:
        text += "; they exceed data.cache_limit, so every epoch downloads them again"
    if loader.shard_groups == 1 and loader.nodes > 1:
        text += (
            f"; in a new run, data.shard_groups: {loader.nodes} would let each machine download "
            f"1/{loader.nodes}"
        )
    return text


class LoaderPosition(Callback):
    """Keeps the loader at the run's position: resuming neither replays nor skips a sample."""

    def __init__(self, loader: ViewLoader) -> None:
        self.loader = loader
        self._bad: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the order of samples needs if the data are stored elsewhere."""
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
