"""MDS shards, written by Streaming's own MDSWriter."""

from pathlib import Path

from streaming import MDSWriter

from data_prep.images import PreparedImage
from data_prep.sources.image_folder import ImageFile

COLUMNS = {"image": "bytes", "label": "int", "path": "str"}

_SHARD_BYTES = 1 << 26
_MAX_SHARD_BYTES = (1 << 32) - 1  # offsets are uint32


class Writer:
    """Writes samples in the order given; ``finish`` makes the data set complete.

    Attributes:
        max_bytes: the largest JPEG that can be written.
    """

    def __init__(self, folder: Path, source: tuple[ImageFile, ...]) -> None:
        # A sample above the limit would make Streaming write an empty shard before it.
        limit = max([_SHARD_BYTES, *(4 * file.size for file in source)])
        self._writer = MDSWriter(
            columns=COLUMNS, out=str(folder), size_limit=min(limit, _MAX_SHARD_BYTES)
        )
        self.max_bytes = _MAX_SHARD_BYTES // 2

    def write(self, file: ImageFile, image: PreparedImage) -> None:
        """Append one sample."""
        path = file.path.encode("utf-8", "backslashreplace").decode()
        self._writer.write({"image": image.jpeg, "label": file.label, "path": path})

    def finish(self) -> None:
        """Write the last shard and the index."""
        self._writer.finish()

    def abort(self) -> None:
        """Stop the writer's threads."""
        self._writer.cancel_future_jobs()
