"""A subset of a data set: a number of images per class, or the images of a list.

Experiments with few labels use 1 % or 10 % of ImageNet's. Published lists are files with one name
per line. Without a list, the same number of images is drawn from each class, by a seed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from pospre import draws
from pospre.data.stores.description import CHOSEN, Identity, hash_of
from pospre.data.stores.reader import Reader, Sample
from pospre.errors import UserError
from pospre.text_lists import read_list


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

    def labels(self) -> Sequence[int]:
        """Return the labels of the subset, if those of the whole are known."""
        labels = self._whole.labels()
        return [labels[index] for index in self.indices] if labels else ()

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label and file."""
        return self._whole.about(int(self.indices[index]))

    def name(self, index: int) -> str:
        """Return a sample's name for messages."""
        return self._whole.name(int(self.indices[index]))

    def _own_identity(self) -> Identity:
        chosen = hash_of([self.indices.astype("<i8").tobytes()])
        return {**self._whole.identity(), CHOSEN: chosen}

    def expect(self, indices: np.ndarray) -> None:
        """Set the samples that will be read."""
        self._whole.expect(self.indices[indices])

    def close(self) -> None:
        """Stop what ``expect`` started."""
        self._whole.close()


def subset(reader: Reader, fraction: float, labels: str | None, seed: int) -> Reader:
    """Return a reader of some samples, in order; with 1 and None of all.

    With a ``fraction`` these are n = max(1, round(fraction · samples / classes)) per class, or all
    of a smaller class: a function of the seed and the samples' indices. The text file ``labels``
    has one file per line: its path in the data set, or its bare name.

    Raises:
        UserError: both are given, the images have no labels, or a listed file is missing.
    """
    if labels is None and fraction == 1:
        return reader
    if labels is not None and fraction != 1:
        raise UserError(
            f"label_fraction={fraction:g} and labels={labels} both choose images; give one of them."
        )
    if "://" in reader.address:
        raise UserError(
            f"{reader.address}: subsets of labels need a local data set, because all shards would "
            "be fetched to see all labels. Copy it first."
        )
    about = [reader.about(index) for index in range(len(reader))]
    if labels is None:
        return SubsetReader(reader, _of_each_class(reader, [a for a, _ in about], fraction, seed))
    return SubsetReader(reader, _listed(reader, [name for _, name in about], Path(labels)))


def half_of(reader: Reader, half: Literal["choose", "judge"]) -> Reader:
    """Return a reader of one of two halves; see ``half_indices``."""
    return SubsetReader(reader, half_indices(len(reader), half, reader.address))


def half_indices(count: int, half: Literal["choose", "judge"], address: str) -> np.ndarray:
    """Return the samples of a half, drawn once by their indices alone; ``UserError`` if empty."""
    index_N = np.arange(count)
    random_N = draws.bits(draws.sample_keys(0, 0, index_N, 0, "half"), 1)[:, 0]
    chosen = index_N[(random_N & 1) == (half == "judge")]
    if not len(chosen):
        raise UserError(f"{address} has {count} image(s), too few for half={half}; give more.")
    return chosen


def _of_each_class(reader: Reader, labels: list[int], fraction: float, seed: int) -> np.ndarray:
    label_N = np.array(labels, np.int64)
    if (label_N < 0).any():
        raise UserError(
            f"label_fraction={fraction:g} needs labels, but {reader.address} has none: put the "
            "images into one folder per class."
        )
    count = max(1, round(fraction * len(label_N) / len(np.unique(label_N))))
    index_N = np.arange(len(label_N))
    random_N = draws.bits(draws.sample_keys(seed, 0, index_N, 0, "label_fraction"), 1)[:, 0]
    order = np.lexsort((random_N, label_N))
    starts = np.searchsorted(label_N[order], label_N[order])
    return np.sort(order[index_N - starts < count])


def _listed(reader: Reader, names: list[str], path: Path) -> np.ndarray:
    wanted = read_list(path, f"labels={path}")
    if not wanted:
        raise UserError(f"labels={path} is empty; write one file name per line.")
    if not any(names):
        raise UserError(
            f"labels={path} lists files, but {reader.address} has no names; give the folder of "
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
