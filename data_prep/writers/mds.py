"""MDS shards, written by Streaming's own MDSWriter."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming import MDSWriter

from data_prep.images import PreparedImage
from data_prep.sources.source import Item

if TYPE_CHECKING:
    from data_prep.audio import PreparedClip

_LABEL_AND_PATH = {"label": "int", "path": "str"}

_SHARD_BYTES = 1 << 26
_MAX_SHARD_BYTES = (1 << 32) - 1  # offsets are uint32


class _Shards:
    """Writes samples in the order given; ``finish`` makes the data set complete.

    Attributes:
        max_bytes: the largest sample that can be written.
    """

    def __init__(self, folder: Path, columns: dict[str, str], largest: int) -> None:
        # A sample above the limit would make Streaming write an empty shard before it.
        limit = min(max(_SHARD_BYTES, largest), _MAX_SHARD_BYTES)
        columns = {**columns, **_LABEL_AND_PATH}
        self._writer = MDSWriter(columns=columns, out=str(folder), size_limit=limit)
        self.max_bytes = _MAX_SHARD_BYTES // 2

    def _append(self, item: Item, column: str, value: Any) -> None:
        path = item.name.encode("utf-8", "backslashreplace").decode()
        self._writer.write({column: value, "label": item.label, "path": path})

    def finish(self) -> None:
        """Write the last shard and the index."""
        self._writer.finish()

    def abort(self) -> None:
        """Stop the writer's threads."""
        self._writer.cancel_future_jobs()


class Writer(_Shards):
    """Writes images: JPEG bytes in the column ``image``."""

    def __init__(self, folder: Path, source: tuple[Item, ...]) -> None:
        super().__init__(folder, {"image": "bytes"}, 4 * max(item.size for item in source))

    def write(self, item: Item, image: PreparedImage) -> None:
        """Append one sample."""
        self._append(item, "image", image.jpeg)


class FeatureWriter(_Shards):
    """Writes the features of clips: float32 (frames, 40) in the column ``features``."""

    def __init__(self, folder: Path, source: tuple[Item, ...], *, num_frames: int) -> None:
        from data_prep.audio import NUM_COEFFICIENTS

        encoding = f"ndarray:float32:{num_frames},{NUM_COEFFICIENTS}"
        super().__init__(folder, {"features": encoding}, 0)

    def write(self, item: Item, clip: "PreparedClip") -> None:
        """Append one sample."""
        self._append(item, "features", clip.features)
