"""The view groups of a recipe, and the loader that crops them from its data."""

from typing import Any

from composer.utils import dist

from pospre.arguments import declared
from pospre.data.loader import ViewLoader, build_loader
from pospre.data.opening import open_reader
from pospre.data.reading import Reading, Storage
from pospre.data.stores.reader import Reader
from pospre.data.views.options import Augment, RandAugment, ViewGroup
from pospre.errors import UserError
from pospre.ranges import Size
from pospre.recipe.recipe import Recipe
from pospre.recipe.sections import View
from pospre.recipe.yaml_text import VARIABLE


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
    loader.probe()
    return loader


def rank_batch(recipe: Recipe, ranks: int) -> int:
    """Return the samples per step on each of ``ranks`` ranks.

    Raises:
        UserError: they cannot share the batch evenly.
    """
    batch = recipe.data.batch_size
    if batch % ranks:
        near = sorted({max(1, batch // ranks), batch // ranks + 1})
        sizes = " or ".join(str(number * ranks) for number in near)
        raise UserError(
            f"data.batch_size = {batch} is the batch over all ranks (GPUs) and must be a multiple "
            f"of their number, {ranks}; use data.batch_size={sizes}, or another number of them"
        )
    return batch // ranks


def open_data(recipe: Recipe) -> Reader:
    """Return a reader of the recipe's data."""
    return open_reader(recipe.data.path, **storage(recipe))


def storage(recipe: Recipe) -> dict[str, Any]:
    """Return the options for accessing and reading the recipe's data and further data."""
    found = declared(recipe.data, Storage)
    if VARIABLE.search(str(found["cache_dir"])):  # a recorded one that the environment gave
        found["cache_dir"] = None
    return {**found, "channels": recipe.encoder.channels}


def build_views(recipe: Recipe) -> dict[str, ViewGroup]:
    """Return the recipe's view groups by name; the default size is the encoder's."""
    size = recipe.encoder.image_size
    return {name: _build_view(name, view, size) for name, view in recipe.data.views.items()}


def _build_view(name: str, view: View, size: Size) -> ViewGroup:
    options = view.model_dump()
    changes = options.pop("augment")
    try:
        if changes["rand_augment"] is not None:
            changes["rand_augment"] = RandAugment(**changes["rand_augment"])
        augment = Augment(**changes)
    except UserError as error:
        raise UserError(f"data.views.{name}.{error}") from None
    return ViewGroup(name=name, augment=augment, **{**options, "size": view.size or size})
