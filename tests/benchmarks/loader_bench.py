"""What all cases of the loaders' benchmark share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import loader_data
from tests.benchmarks.loader_worker import Job, Views

ONE_VIEW = (Views(1, 224, (0.08, 1.0)),)
MULTI_CROP = (Views(2, 224, (0.32, 1.0)), Views(8, 96, (0.05, 0.32)))


@dataclass(frozen=True)
class Bench:
    """The settings of a benchmark.

    Attributes:
        data: the image folder.
        work: where converted data and logs go.
        runs: how often everything is measured.
        batch_size: images per batch.
        num_workers: of every loader.
    """

    data: Path
    work: Path
    runs: int
    batch_size: int
    num_workers: int

    def job(self, loader: str, data: Path | str, views: Sequence[Views], **options: Any) -> Job:
        """Return a job with these settings."""
        return Job(loader, str(data), tuple(views), self.batch_size, self.num_workers, options)

    def prepared(self, kind: str) -> Path:
        """Return the images as ``kind``."""
        return loader_data.prepared(kind, self.data, self.work, self.num_workers)
