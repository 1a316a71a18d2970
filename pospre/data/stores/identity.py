"""Hashes that distinguish data sets of the same size, by what they are of.

No format can give every hash without reading all images. Two data sets are considered different if
a hash that both have differs. A folder and its shards are compared by classes and labels, shards
and a ``.beton`` also by the checksums of their images.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Identity = dict[str, str]
LABELS = "labels"


def hash_of(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of concatenated bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def hash_of_labels(labels: Sequence[int] | np.ndarray) -> str:
    """Return the hash of all labels in order; it is recorded when a data set is converted."""
    return hash_of([np.asarray(labels, "<i8").tobytes()])


def difference(
    one: Mapping[str, str], other: Mapping[str, str], first: str = "before", second: str = "now"
) -> str:
    """Describe how two data sets differ, with both hashes; empty: no known difference.

    ``first`` and ``second`` say when or where they were seen.
    """
    for what, found in other.items():
        if one.get(what, found) != found:
            return f"the {what} differ (SHA-256 {one[what][:12]} {first}, {found[:12]} {second})"
    return ""
