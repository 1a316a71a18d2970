"""Keys of recipes that were renamed or are gone: an error says what to write, old records open.

What a user writes must have today's names. What a run or a checkpoint recorded under the old ones
is read as if it had these.
"""

from fnmatch import fnmatchcase
from typing import Any

# the old dotted key (``*``: a name of the user's own), and what its last part is now
RENAMED = {
    "data.views.*.augment.grey_rate": "grayscale_rate",
    "data.views.*.augment.solarise_rate": "solarize_rate",
    "data.views.*.augment.solarise_threshold": "solarize_threshold",
}

# the section and key of what is gone, its old default, and what to do about any other value
REMOVED = {
    "data.page_cache": ("os", "leave it out: the operating system hears what will be read"),
}


def gone(key: str) -> str | None:
    """Return what to say of a dotted key that there is no more; None if there never was one."""
    if renamed := new_name(key):
        return f"key '{key}' is called '{renamed}' now; rename it"
    return f"key '{key}' is gone; {REMOVED[key][1]}" if key in REMOVED else None


def new_name(key: str) -> str | None:
    """Return what the last part of a dotted key is called now; None where it was not renamed."""
    return next((new for old, new in RENAMED.items() if fnmatchcase(key, old)), None)


def without_old_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without the keys that are gone where they hold their old default.

    So a recipe that a run wrote down, with all its defaults, can be used again.
    """
    for key, (default, _) in REMOVED.items():
        section, _, gone = key.partition(".")
        given = recipe.get(section)
        if isinstance(given, dict) and given.get(gone) == default:
            kept = {name: value for name, value in given.items() if name != gone}
            recipe = {**recipe, section: kept}
    return recipe


def with_new_names(recorded: Any, key: str = "") -> Any:
    """Return a recorded recipe, or its part at ``key``, with today's keys; order is kept."""
    if not isinstance(recorded, dict):
        return recorded
    keys = {name: f"{key}.{name}" if key else str(name) for name in recorded}
    return {
        new_name(keys[name]) or name: with_new_names(value, keys[name])
        for name, value in recorded.items()
        if keys[name] not in REMOVED
    }
