"""Labels as data sets write them (numbers, names or nothing) → class names, places among them."""

from collections.abc import Iterable, Mapping
from typing import Any

from pospre.errors import UserError

_MOST_CLASSES = 1_000_000

RawLabel = int | str | None
"""A number, a name, or None (and -1) for no label."""


def class_names(labels: Iterable[RawLabel], where: object) -> list[str] | None:
    """Return the classes: the numbers from 0 to the largest, or the sorted names; None if none.

    Args:
        labels: of all parts of a data set, so that a label means the same in each of them.
        where: named in errors.

    Raises:
        UserError: numbers and names are mixed, or a label can be no class.
    """
    found = {label for label in labels if label is not None and label != -1}
    names = {label for label in found if isinstance(label, str)}
    numbers = {label for label in found if isinstance(label, int)}
    odd = found - names - numbers
    if odd or (names and numbers):
        shown = ", ".join(repr(label) for label in sorted(found, key=repr)[:4])
        raise UserError(f"{where}: labels must be all whole numbers or all names, not {shown}.")
    if names:
        return sorted(names)
    if not numbers:
        return None
    if min(numbers) < 0 or max(numbers) >= _MOST_CLASSES:
        raise UserError(
            f"{where}: labels go from {min(numbers)} to {max(numbers)}; classes are numbers from 0."
        )
    return [str(number) for number in range(max(numbers) + 1)]


def shared_categories(
    own: list[dict[str, Any]], of_train: list[dict[str, Any]], where: object
) -> list[dict[str, Any]]:
    """Return the training part's categories (``id`` and ``name``) by id, for another part's labels.

    Raises:
        UserError: the other part has one that the training part lacks, or names differently.
    """
    names = {category["id"]: category["name"] for category in of_train}
    for category in own:
        number, name = category["id"], category["name"]
        if names.get(number) != name:
            told = f"calls {names[number]!r}" if number in names else "does not have"
            raise UserError(f"{where}: the training part {told} the category {number} ({name!r}).")
    return sorted(of_train, key=lambda category: category["id"])


def class_places(classes: list[str] | None) -> dict[str, int]:
    """Return the label of every class by its name."""
    return {name: label for label, name in enumerate(classes or ())}


def place_of(label: RawLabel, places: Mapping[str, int], where: object) -> int:
    """Return a label's place among the classes, -1 for none.

    Raises:
        UserError: it is not among them.
    """
    if label is None or label == -1 or not places:
        return -1
    if isinstance(label, str) and label in places:
        return places[label]
    if isinstance(label, int) and 0 <= label < len(places):
        return label
    raise UserError(f"{where} has the label {label!r}, but there are {len(places)} classes.")
