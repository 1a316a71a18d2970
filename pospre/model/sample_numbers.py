"""Checks the samples' indices and epochs, from which masks are drawn."""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict

from pospre.batch import EPOCH, INDEX, Batch
from pospre.errors import UserError

_LOOKED_AT = 256
"""Number of forwards in which indices are checked: on a GPU, reading them synchronises."""
_PIXELS_APART = 997
_ROUNDS = 3, 5
"""An epoch may be too long after three times as many samples as indices, and is after five."""
_SAMPLES = 1024
"""Samples after which an epoch may be too long: fewer are a trial on one batch."""


class SampleNumbers:
    """Detects indices that repeat within an epoch, and epochs that do not count."""

    def __init__(self) -> None:
        self.calls = 0
        self.images: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.repeats: Counter[int] = Counter()
        self._epochs: set[int] = set()
        self._samples = self._highest = 0
        self._rounds = float(_ROUNDS[0])  # after which the indices are looked at again

    @property
    def num_epochs(self) -> int:
        """Number of epochs seen so far."""
        return len(self._epochs)

    def look(self, batch: Batch) -> None:
        """Raise ``UserError`` if every sample's index has repeated twice, with another image.

        Masks are drawn from index and epoch, so such images get the same masks. A few repeats are
        fine: samplers pad the last batch or draw with replacement. An epoch that lasts for five
        times as many samples as there are indices gives a warning.
        """
        self._samples += len(batch[INDEX])
        images = next((value for key, value in batch.items() if key.endswith("/image")), None)
        is_looked_at = self.calls < _LOOKED_AT and images is not None
        if not is_looked_at and not self._is_long():
            self.images.clear()
            return
        indices, epochs = batch[INDEX].tolist(), batch[EPOCH].tolist()
        self._epochs.update(epochs)
        self._highest = max(self._highest, *indices)
        if self._is_long():
            self._rounds += 1
        if _ROUNDS[1] < self._rounds < math.inf:
            self._warn_of_epoch()
        if images is None or not is_looked_at:
            return
        self.calls += 1
        pixels = images.flatten(1)[:, ::_PIXELS_APART].tolist()
        for index, epoch, row in zip(indices, epochs, pixels, strict=True):
            seen, image = self.images[index, epoch], hash(tuple(row))
            self.repeats[index] += bool(seen) and image not in seen
            seen.add(image)
        if all(self.repeats[index] >= 2 for index in indices):
            raise UserError(
                f"three or more different images have the same '{INDEX}' and '{EPOCH}', from which "
                "masks are drawn, so the masks would never change. Give each image its "
                "position in the data set as index (not its position in the batch), and count the "
                "epochs. To repeat a sample within an epoch, use another epoch number."
            )

    def _is_long(self) -> bool:
        """Return whether the only epoch so far may be too long for the indices seen."""
        is_long = self._samples > max(_SAMPLES, self._rounds * (self._highest + 1))
        return is_long and len(self._epochs) == 1

    def _warn_of_epoch(self) -> None:
        self._rounds = math.inf  # once
        warnings.warn(
            f"the batches' '{EPOCH}' is {min(self._epochs)} for {self._samples} samples, but their "
            f"'{INDEX}' only goes up to {self._highest}. Masks are drawn from both, so the masks "
            "of an image never change. Count the epochs: pospre.from_images(images, index=…, "
            "epoch=epoch).",
            stacklevel=6,
        )
