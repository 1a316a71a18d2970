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

# the dotted key of what is gone, and what to do
REMOVED = {"data.page_cache": "leave it out: the operating system hears what will be read"}


def new_name(key: str) -> str | None:
    """Return what the last part of a dotted key is called now; None where it was not renamed."""
    return next((new for old, new in RENAMED.items() if fnmatchcase(key, old)), None)


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
