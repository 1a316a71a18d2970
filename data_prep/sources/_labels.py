"""Labels of sources: numbers, names or none."""

from collections.abc import Iterable, Mapping, Sequence

from pospre.errors import UserError

_MOST_CLASSES = 1_000_000

RawLabel = int | str | None
"""A number, a name, or None (and -1) for no label."""


def class_names(labels: Iterable[RawLabel], where: object) -> list[str] | None:
    """Return the classes: the numbers from 0 to the largest, or the sorted names; None if none.

    ``labels`` are of all splits, so that they have the same meaning in each. ``UserError`` if
    numbers and names are mixed, or a label cannot be a class; it names ``where``.
    """
    try:
        known = {label for label in labels if label is not None and label != -1}
    except TypeError as error:  # for example lists
        raise UserError(f"{where}: labels must be whole numbers or names ({error}).") from error
    names = {label for label in known if isinstance(label, str)}
    numbers = {label for label in known if isinstance(label, int)}
    odd = known - names - numbers
    if odd or (names and numbers):
        shown = ", ".join(repr(label) for label in sorted(known, key=repr)[:4])
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


def labels_of(classes: Sequence[str] | None) -> dict[str, int]:
    """Return the label of every class by its name."""
    return {name: label for label, name in enumerate(classes or ())}


def label_of(raw: RawLabel, labels: Mapping[str, int], where: object) -> int:
    """Return the number of a class, -1 for none; raise UserError if it is not a class."""
    if raw is None or raw == -1 or not labels:
        return -1
    if isinstance(raw, str) and raw in labels:
        return labels[raw]
    if isinstance(raw, int) and 0 <= raw < len(labels):
        return raw
    raise UserError(f"{where} has the label {raw!r}, but there are {len(labels)} classes.")
