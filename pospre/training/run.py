"""One run from start to end: its folder, where to go on, training, and what follows it."""

import os
import shutil
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml
from composer.utils import dist

from pospre.config import Recipe
from pospre.data.memory import estimate_memory
from pospre.errors import UserError
from pospre.object_store import check_writable, is_remote
from pospre.training.build import Parts, assemble, build_parts, with_defaults
from pospre.training.checkpoint import (
    Found,
    checkpoints_in,
    compare_tensors,
    local_copy,
    newest_checkpoint,
    read_checkpoint,
    recorded,
    remove_checkpoints,
)
from pospre.training.ranks import from_rank_zero, say
from pospre.training.uploads import Uploads, restore_metrics
from pospre.training.weights import start_from
from pospre.yaml_text import read_mapping

# What may differ when a run goes on: where things are and how fast they go, not what is learned
# (but for DropPos with attentive weights: its loss depends slightly on trainer.microbatch_size).
FREE_KEYS = (
    "data.path",
    "data.num_workers",
    "data.bad_samples",  # so that a run that met one goes on as the message says
    "data.cache_dir",
    "data.cache_limit",
    "data.page_cache",
    "loggers",
    "evaluation",
    "trainer.device",
    "trainer.run_folder",
    "trainer.overwrite",
    "trainer.save_folder",
    "trainer.save_interval",
    "trainer.keep_checkpoints",
    "trainer.autoresume",
    "trainer.microbatch_size",
    "trainer.compile",
    "trainer.fsdp",
    "trainer.log_interval",
    "trainer.progress_bar",
    "trainer.dist_timeout",
)


def train(recipe: Recipe) -> bool:
    """Train a recipe to its end, or go on where it stopped; tell whether it was finished before."""
    folder = recipe.checkpoint_folder()
    if is_remote(folder) and dist.get_global_rank() == 0:
        check_writable(folder)  # before anything slow
    parts = build_parts(recipe)
    memory = estimate_memory(parts.loader, page_cache=recipe.data.page_cache)
    memory.check()
    if dist.get_world_size() > 1:
        dist.initialize_dist(parts.device, recipe.trainer.dist_timeout)
    _start_weights(parts)
    start = from_rank_zero(lambda: open_run(parts))
    if start is not None and start.batch >= parts.total_steps:
        say(f"{recipe.run_name} is already finished ({start.uri}); nothing to train")
        return True
    say(memory.describe())
    fit(parts, start)
    return False


def _start_weights(parts: Parts) -> None:
    """Load ``encoder.weights``, unless a checkpoint of this very run is there to go on from."""
    recipe = parts.recipe
    if recipe.encoder.weights is None:
        return
    folder, again = recipe.checkpoint_folder(), recipe.trainer.overwrite
    if from_rank_zero(lambda: again or newest_checkpoint(folder) is None):
        say(start_from(parts.model, recipe.encoder.weights, recipe.encoder.weights_from))


def fit(parts: Parts, start: Found | None) -> None:
    """Train from ``start``, or from nothing, to the end of the recipe."""
    recipe = parts.recipe
    uploads = None
    if is_remote(recipe.checkpoint_folder()) and dist.get_global_rank() == 0:
        uploads = Uploads(recipe.run_path(), recipe.checkpoint_folder())
    downloads = start is not None and dist.get_local_rank() == 0
    with local_copy(start.uri) if start and downloads else nullcontext() as path:
        # only the first rank of a node reads the file; the others must name one as well
        load_path = None if start is None else str(path or start.uri.rpartition("/")[2])
        trainer = assemble(
            parts, load_path=load_path, earlier=_earlier(parts.recipe, start), uploads=uploads
        )
    if start is not None:
        say(f"going on from {start.uri}")
    try:
        trainer.fit()
    finally:
        missing = uploads.finish() if uploads is not None else None
        if missing is not None:
            print(f"warning: {missing}", file=sys.stderr)
    trainer.close()
    if missing is not None:
        raise UserError(missing)


def _earlier(recipe: Recipe, start: Found | None) -> list[Path]:
    """Return the local checkpoints up to ``start``, oldest first."""
    if start is None:
        return []
    local = checkpoints_in(str(recipe.local_checkpoints()))
    return [Path(found.uri) for found in reversed(local) if found[:2] <= start[:2]]


def open_run(parts: Parts) -> Found | None:
    """Make or check the run's folder and return the checkpoint to go on from, if any.

    Nothing is written before everything is checked.

    Raises:
        UserError: the bucket does not work, or the folder or its checkpoints are of another run.
    """
    recipe, folder = parts.recipe, parts.recipe.checkpoint_folder()
    _check_places(recipe)
    if recipe.trainer.overwrite:
        _clear(recipe)
    _check_folder(recipe)
    start = newest_checkpoint(folder)
    if start is not None:
        _check_checkpoint(parts, start)
    _write_recipe(recipe)
    if start is not None and is_remote(folder):
        restore_metrics(recipe.run_path(), folder)
    return start


def _check_places(recipe: Recipe) -> None:
    """Raise a ``UserError`` if the run's folders are no folders, or not writable."""
    folder = recipe.checkpoint_folder()
    places = {f"run folder {recipe.run_path()}": recipe.run_path()}
    if not is_remote(folder):
        places[f"trainer.save_folder {folder}"] = Path(folder)
    for name, place in places.items():
        nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise UserError(
                f"{name}: {nearest} is a file; choose another run_name, trainer.run_folder or "
                "trainer.save_folder"
            )
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"{name} cannot be written: no permission to write into {nearest}")


def _clear(recipe: Recipe) -> None:
    """Remove an earlier run of this name, if all that would go is of this name."""
    path, folder = recipe.run_path(), recipe.checkpoint_folder()
    if not (path / "recipe.yaml").exists() and _strangers(path):
        raise UserError(f"{path} is no run folder (no recipe.yaml); trainer.overwrite spares it")
    newest = newest_checkpoint(folder) if recipe.trainer.save_folder else None
    if newest is not None:
        with local_copy(newest.uri) as file:
            owner = recorded(read_checkpoint(file, newest.uri))[0].get("run_name")
        if owner != recipe.run_name:
            raise UserError(
                f"{newest.uri} is of run '{owner}'; trainer.overwrite spares it: choose another "
                "trainer.save_folder"
            )
    try:
        remove_checkpoints(folder)
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        raise UserError(f"trainer.overwrite: the earlier run cannot be deleted: {error}") from error


def _strangers(path: Path) -> list[Path]:
    """Return what a start that failed half-way does not leave in a run folder."""
    if not path.exists():
        return []
    remains = {path / "recipe.yaml.partial"}
    checkpoints = path / "checkpoints"
    if checkpoints.is_dir() and not any(checkpoints.iterdir()):
        remains.add(checkpoints)
    return [entry for entry in path.iterdir() if entry not in remains]


def _check_folder(recipe: Recipe) -> None:
    path = recipe.run_path()
    if (path / "recipe.yaml").exists():
        _compare(read_mapping(path / "recipe.yaml"), recipe, f"{path}/recipe.yaml")
    elif _strangers(path):
        raise UserError(
            f"{path} exists and is no run folder (no recipe.yaml); choose another run_name"
        )


def _check_checkpoint(parts: Parts, start: Found) -> None:
    recipe = parts.recipe
    if not recipe.trainer.autoresume:
        raise UserError(
            f"{start.uri} exists and trainer.autoresume is false; use trainer.autoresume=true to "
            "go on, trainer.overwrite=true to start again, or another run_name"
        )
    with local_copy(start.uri) as path:
        content = read_checkpoint(path, start.uri)
    previous, num_samples = recorded(content)
    _compare(previous, recipe, start.uri)
    if num_samples != parts.loader.num_samples:
        raise UserError(
            f"{start.uri} was trained on {num_samples} images, but data.path = "
            f"{recipe.data.path} holds {parts.loader.num_samples}; choose another run_name"
        )
    compare_tensors(parts.model.state_dict(), content["state"]["model"], start.uri)


def _compare(previous: dict[str, Any], recipe: Recipe, source: str) -> None:
    """Raise a ``UserError`` naming the first key in which two recipes are not the same run."""
    previous = with_defaults(previous)
    key = first_difference(previous, recipe.dump())
    if key is not None:
        raise UserError(
            f"run '{recipe.run_name}' exists with another recipe: {source} has "
            f"{key} = {_look_up(previous, key)}, this one {_look_up(recipe.dump(), key)}; "
            "choose another run_name=…, or trainer.overwrite=true to delete it and start again"
        )


def first_difference(old: Any, new: Any, key: str = "") -> str | None:
    """Return the first dotted key in which two recipes differ, apart from ``FREE_KEYS``."""
    if key in FREE_KEYS or old == new:
        return None
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return key
    names = [*new, *(name for name in old if name not in new)]
    found = (first_difference(old.get(n), new.get(n), f"{key}.{n}" if key else n) for n in names)
    return next((difference for difference in found if difference is not None), None)


def _look_up(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe.get(part) if isinstance(recipe, dict) else None
    return recipe


def _write_recipe(recipe: Recipe) -> None:
    """Make the run's folders with the recipe in them, or leave nothing."""
    target = recipe.run_path() / "recipe.yaml"
    partial = target.with_name(f"{target.name}.partial")
    folders = [recipe.run_path()]
    if not is_remote(recipe.checkpoint_folder()):
        folders.append(Path(recipe.checkpoint_folder()))
    new = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    is_new = not target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(yaml.safe_dump(recipe.dump(), sort_keys=False), encoding="utf-8")
        os.replace(partial, target)
        folders[-1].mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for path in (partial, target) if is_new else (partial,):
            with suppress(OSError):
                path.unlink()
        for path in sorted(new, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):
                path.rmdir()
        raise UserError(
            f"run folder {target.parent} or trainer.save_folder cannot be written: {error}"
        ) from error
