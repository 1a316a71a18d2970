"""A line on the terminal while the first shard of a run is downloaded."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from pospre.data.bucket.transfer import Transfer


def rank() -> int:
    """Return the number of this rank, as the launcher says it."""
    return int(os.environ.get("RANK", "0"))


class Line:
    """Shows how far a download is; ``bar`` None: nowhere."""

    def __init__(self, bar: "tqdm[None] | None") -> None:
        self._bar = bar

    def show(self, transfer: Transfer | None, size: int) -> None:
        """Draw the line anew."""
        if self._bar is not None and transfer is not None:
            self._bar.total = size
            self._bar.update(transfer.done - self._bar.n)


class Progress:
    """Gives one line, for the first download that anybody waits for; later ones are quiet."""

    def __init__(self) -> None:
        self._is_due = sys.stderr.isatty() and rank() == 0

    @contextmanager
    def bar(self, name: str) -> Iterator[Line]:
        """Give the line of a download, to be left standing when it is there."""
        if not self._is_due:
            yield Line(None)
            return
        self._is_due = False
        with tqdm(desc=name, unit="B", unit_scale=True, file=sys.stderr) as bar:
            yield Line(bar)
