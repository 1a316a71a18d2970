"""One run from start to end: its folder, where to go on, training, and what follows it."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import yaml
from composer.utils import dist

from pospre.config import Recipe
from pospre.errors import UserError
from pospre.training.build import Parts, assemble, build_parts
from pospre.training.callbacks.mirror import restore_metrics
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
from pospre.training.object_store import check_writable, is_remote
from pospre.yaml_text import read_mapping

Value = TypeVar("Value")

# What may differ when a run goes on: where things are and how fast they go, not what is learned.
FREE_KEYS = (
    "data.path",
    "data.num_workers",
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
    parts = build_parts(recipe)
    if dist.get_world_size() > 1:
        dist.initialize_dist(parts.device, recipe.trainer.dist_timeout)
    start = from_rank_zero(lambda: open_run(parts))
    if start is not None and start.batch >= parts.total_steps:
        say(f"{recipe.run_name} is already finished ({start.uri}); nothing to train")
        return True
    fit(parts, start)
    return False


def fit(parts: Parts, start: Found | None) -> None:
    """Train from ``start``, or from nothing, to the end of the recipe."""
    downloads = start is not None and dist.get_local_rank() == 0
    with local_copy(start.uri) if start and downloads else nullcontext() as path:
        # only the first rank of a node reads the file; the others must name one as well
        load_path = None if start is None else str(path or start.uri.rpartition("/")[2])
        trainer = assemble(parts, load_path=load_path, earlier=_earlier(parts.recipe, start))
    if start is not None:
        say(f"going on from {start.uri}")
    trainer.fit()
    trainer.close()


def _earlier(recipe: Recipe, start: Found | None) -> list[str]:
    """Return the local checkpoints up to ``start``, oldest first."""
    folder = recipe.checkpoint_folder()
    if start is None or is_remote(folder):
        return []
    return [found.uri for found in reversed(checkpoints_in(folder)) if found <= start]


def open_run(parts: Parts) -> Found | None:
    """Make or check the run's folder and return the checkpoint to go on from, if any.

    Nothing is written before everything is checked.

    Raises:
        UserError: the bucket does not work, or the folder or its checkpoints are of another run.
    """
    recipe, folder = parts.recipe, parts.recipe.checkpoint_folder()
    if is_remote(folder):
        check_writable(folder)
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


def _clear(recipe: Recipe) -> None:
    """Remove an earlier run of this name."""
    path = recipe.run_path()
    if path.exists() and any(path.iterdir()) and not (path / "recipe.yaml").exists():
        raise UserError(f"{path} is no run folder (no recipe.yaml); trainer.overwrite spares it")
    remove_checkpoints(recipe.checkpoint_folder())
    shutil.rmtree(path, ignore_errors=True)


def _check_folder(recipe: Recipe) -> None:
    path = recipe.run_path()
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file; choose another run_name or trainer.run_folder")
    if (path / "recipe.yaml").exists():
        _compare(read_mapping(path / "recipe.yaml"), recipe, f"{path}/recipe.yaml")
    elif any(path.iterdir()):
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
    path = recipe.run_path()
    try:
        if not is_remote(recipe.checkpoint_folder()):
            Path(recipe.checkpoint_folder()).mkdir(parents=True, exist_ok=True)
        path.mkdir(parents=True, exist_ok=True)
        partial = path / "recipe.yaml.partial"
        partial.write_text(yaml.safe_dump(recipe.dump(), sort_keys=False), encoding="utf-8")
        os.replace(partial, path / "recipe.yaml")
    except OSError as error:
        raise UserError(
            f"run folder {path} or trainer.save_folder cannot be written: {error}"
        ) from error


def from_rank_zero(work: Callable[[], Value]) -> Value:
    """Do ``work`` on rank 0 only and return its result on every rank."""
    result = [work()] if dist.get_global_rank() == 0 else [None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]


def say(text: str) -> None:
    """Print a line, once however many ranks there are."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)
