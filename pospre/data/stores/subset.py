"""Some images of a data set: so many of every class, or those that a list names.

Experiments with few labels take 1 % or 10 % of ImageNet's. The published lists are files with one
name in a line; without one as many images are drawn of each class, by a seed.
"""

from pathlib import Path

import numpy as np

from pospre import draws
from pospre.data.stores.identity import Identity, hash_of
from pospre.data.stores.reader import Reader, Sample
from pospre.errors import UserError


class SubsetReader(Reader):
    """Reads the samples ``indices`` of another reader, renumbered from 0."""

    def __init__(self, whole: Reader, indices: np.ndarray) -> None:
        self._whole, self.indices = whole, indices
        self.path, self.format, self.classes = whole.path, whole.format, whole.classes
        self.remedy, self.features, self.noted = whole.remedy, whole.features, whole.noted
        self.decoding, self.max_pixels = whole.decoding, whole.max_pixels
        self.checksums = None if whole.checksums is None else whole.checksums[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        """Return a sample."""
        return self._whole.read(int(self.indices[index]))

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label and file."""
        return self._whole.about(int(self.indices[index]))

    def name(self, index: int) -> str:
        """Return what to call a sample in messages."""
        return self._whole.name(int(self.indices[index]))

    def _own_identity(self) -> Identity:
        chosen = hash_of([self.indices.astype("<i8").tobytes()])
        return {**self._whole.identity(), "chosen samples": chosen}

    def expect(self, indices: np.ndarray) -> None:
        """Hear which samples will be read."""
        self._whole.expect(self.indices[indices])

    def close(self) -> None:
        """End what ``expect`` started."""
        self._whole.close()


def subset(reader: Reader, fraction: float, labels: str | None, seed: int) -> Reader:
    """Return a reader of some samples, in their order; all with 1 and None.

    Args:
        reader: of all.
        fraction: n = max(1, round(fraction · samples / classes)) of each class, or all that a class
            has; a function of the seed and the places of the samples in their data set.
        labels: text file with a file in each line: its path below the data set, or its bare name.
        seed: of the draw.

    Raises:
        UserError: both are given, the images have no labels, or the list names what is not there.
    """
    if labels is None and fraction == 1:
        return reader
    if labels is not None and fraction != 1:
        raise UserError(
            f"label_fraction={fraction:g} and labels={labels} both choose images; give one of them."
        )
    if "://" in reader.address:
        raise UserError(
            f"{reader.address}: a part of the labels is chosen on local data sets; to see all "
            "labels every shard would have to be fetched. Copy it first."
        )
    about = [reader.about(index) for index in range(len(reader))]
    if labels is None:
        return SubsetReader(reader, _of_each_class(reader, [a for a, _ in about], fraction, seed))
    return SubsetReader(reader, _listed(reader, [name for _, name in about], Path(labels)))


def _of_each_class(reader: Reader, labels: list[int], fraction: float, seed: int) -> np.ndarray:
    label_N = np.array(labels, np.int64)
    if (label_N < 0).any():
        raise UserError(
            f"label_fraction={fraction:g} needs labels, and {reader.address} has none: put the "
            "images into one folder per class."
        )
    count = max(1, round(fraction * len(label_N) / len(np.unique(label_N))))
    index_N = np.arange(len(label_N))
    random_N = draws.bits(draws.sample_keys(seed, 0, index_N, 0, "label_fraction"), 1)[:, 0]
    order = np.lexsort((random_N, label_N))
    starts = np.searchsorted(label_N[order], label_N[order])
    return np.sort(order[index_N - starts < count])


def _listed(reader: Reader, names: list[str], path: Path) -> np.ndarray:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"labels={path} cannot be read ({error}).") from error
    wanted = [line.strip() for line in lines if line.strip()]
    if not wanted:
        raise UserError(f"labels={path} is empty; it takes a file name in each line.")
    if not any(names):
        raise UserError(
            f"labels={path} names files, and {reader.address} keeps no names; give the folder of "
            "images, or MDS shards of it."
        )
    bare = [name.rpartition("/")[2] for name in names]
    known = {name: index for index, name in enumerate(bare)}
    twice = {name for index, name in enumerate(bare) if known[name] != index}
    known = {name: index for name, index in known.items() if name not in twice}
    known |= {name: index for index, name in enumerate(names)}
    missing = [name for name in wanted if name not in known]
    if missing:
        where = "is in several folders of" if missing[0] in twice else "is not in"
        raise UserError(
            f"labels={path}: {len(missing)} of its {len(wanted)} files cannot be found; the first, "
            f"{missing[0]}, {where} {reader.address}."
        )
    return np.unique([known[name] for name in wanted])
