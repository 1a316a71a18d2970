"""Whether two recipes are the same run: the check before one resumes."""

import re
from collections.abc import Mapping
from typing import Any

from pospre.errors import UserError
from pospre.recipe.provenance import COMPARED, fingerprint
from pospre.recipe.recipe import Recipe
from pospre.recipe.yaml_text import VARIABLE, key_parts

# What may differ when a run resumes: where things are and how fast they go, not what is learned
# (but for DropPos with attentive weights: its loss depends slightly on trainer.microbatch_size).
# With data.bad_samples, a run that met one can resume as the message says; with another
# trainer.max_duration it differs from there on, and a line says so.
_FREE = {
    "data": "path num_workers bad_samples cache_dir cache_limit",
    "reference": "store",
    "verdict": "data stop",
    "trainer": """
        max_duration device run_folder overwrite save_folder save_interval hours_between_failures
        keep_checkpoints keep_remote keep_best autoresume microbatch_size activation_checkpointing
        compile attention fsdp log_interval progress_bar dist_timeout rendezvous_timeout
        peer_timeout
    """,
}
_FREE_OF_SECTIONS = (f"{section}.{key}" for section in _FREE for key in _FREE[section].split())
FREE_KEYS = ("callbacks", "loggers", "evaluation", *_FREE_OF_SECTIONS)
_STAGE_END = re.compile(r"stages\.\d+\.until")


def compare_recipes(
    previous: dict[str, Any],
    recipe: Recipe,
    source: str,
    fingerprints: Mapping[str, str] | None = None,
) -> None:
    """Raise a ``UserError`` naming the first key in which two recipes are not the same run.

    It also names the ``source`` of the previous one. ``fingerprints`` are of the values from the
    environment; None treats these keys as equal.
    """
    now = recipe.record()
    key = first_difference(previous, _as_recorded(previous, recipe, fingerprints))
    if key is None:
        return
    elsewhere = " and trainer.save_folder" if recipe.trainer.save_folder else ""
    if key == "run_name":
        raise UserError(
            f"{source} belongs to run '{previous['run_name']}', not to '{recipe.run_name}'; choose "
            f"another {'trainer.save_folder' if elsewhere else 'run_name'}"
        )
    old, new = (_look_up(one, key) for one in (previous, now))
    new = f"another value of {new}" if old == new else new
    section, *within = key_parts(key)
    if section == "algorithms" and len(within) == 1 and None in (old, new):  # another method
        key = "algorithms"
        old, new = (" + ".join(one["algorithms"]) for one in (previous, now))
    same = f"give {key}={old} to resume it, or " if key == "trainer.precision" else ""
    raise UserError(
        f"run '{recipe.run_name}' exists with another recipe: {source} has {key} = {old}, this one "
        f"{new}; {same}choose another run_name=…{elsewhere}, or trainer.overwrite=true to delete "
        "it and start again"
    )


def _as_recorded(
    previous: dict[str, Any], recipe: Recipe, fingerprints: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return a recipe with recorded references instead of equal values."""
    now = recipe.dump()
    for dotted in COMPARED:
        section, _, key = dotted.partition(".")
        old = _look_up(previous, dotted)
        if not VARIABLE.search(str(old)):
            continue
        if fingerprints is None or fingerprints.get(dotted) == fingerprint(
            recipe.run_name, dotted, now[section][key]
        ):
            now[section][key] = old
    return now


def first_difference(old: Any, new: Any, key: str = "") -> str | None:
    """Return the first dotted key in which two recipes differ, apart from ``FREE_KEYS``.

    Ends of stages may differ, too: some of them may still change.
    """
    if key in FREE_KEYS or _STAGE_END.fullmatch(key) or old == new:
        return None
    old, new = _numbered(old), _numbered(new)
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return key
    names = [*new, *(name for name in old if name not in new)]
    differences = (
        first_difference(old.get(n), new.get(n), f"{key}.{n}" if key else n) for n in names
    )
    return next((difference for difference in differences if difference is not None), None)


def _numbered(value: Any) -> Any:
    """Return a list of sections as a section with their numbers as keys."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value


def _look_up(recipe: Any, key: str) -> Any:
    for part in key_parts(key):
        recipe = _numbered(recipe)
        recipe = recipe.get(part) if isinstance(recipe, dict) else None
    return recipe
