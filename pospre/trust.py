"""What a user trusts of a recipe that another person may have written.

Importing a module runs its code, and a bucket's owner sees the addresses that are asked for. A
recipe that is trained is the user's own; its classes are trusted. Any other recipe may be a
stranger's: one recorded in a run, checkpoint or export, or a file that is only looked at
(``pospre.plan``, ``--resolve``, ``pospre.loader_report``). Of these only names are taken that the
option ``--trust`` or the variable ``POSPRE_TRUST`` lists.
"""

import os
import sys
from collections.abc import Iterable

VARIABLE = "POSPRE_TRUST"
_trusted: set[str] = set()


def trust(names: Iterable[str]) -> None:
    """Trust modules, packages with all their modules, and environment variables."""
    _trusted.update(name.partition(":")[0] for name in names)


def trust_classes(names: Iterable[str]) -> None:
    """Trust the modules of the classes of other packages that a recipe to train names."""
    trust(name for name in names if ":" in name)


def is_trusted(name: str) -> bool:
    """Return whether a module or variable is trusted; the caller's own imports are."""
    listed = {*_trusted, *os.environ.get(VARIABLE, "").replace(",", " ").split()}
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return name in sys.modules or not listed.isdisjoint(above)


def remedy(name: str) -> str:
    """Return how to trust a name, for messages."""
    return f"If you trust it, add --trust {name} or set {VARIABLE}={name}"
