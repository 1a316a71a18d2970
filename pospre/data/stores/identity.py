"""What tells a data set from another of as many samples: hashes, by what they are of.

No format can give every hash without reading all images. So two data sets differ where a hash that
both have does: a folder and shards of it are compared by their classes and labels, shards and a
``.beton`` by the checksums of their images as well.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Identity = dict[str, str]
LABELS = "labels"


def hash_of(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of texts, one after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def hash_of_labels(labels: Sequence[int] | np.ndarray) -> str:
    """Return the hash of all labels in their order; it is noted when a data set is converted."""
    return hash_of([np.asarray(labels, "<i8").tobytes()])


def difference(
    one: Mapping[str, str], other: Mapping[str, str], first: str = "before", second: str = "now"
) -> str:
    """Say in what two data sets differ, with both hashes; an empty text: in nothing known.

    Args:
        one: hashes of a data set.
        other: hashes of another data set.
        first: when or where ``one`` was seen.
        second: when or where ``other`` was seen.
    """
    for what, found in other.items():
        if one.get(what, found) != found:
            return (
                f"the {what} are others (SHA-256 {one[what][:12]} {first}, {found[:12]} {second})"
            )
    return ""
