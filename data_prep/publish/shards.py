"""MDS shards, written by Streaming's own MDSWriter, one block at a time.

Finished blocks of both formats are stored like this; a ``.beton`` is made from its shards.
"""

from pathlib import Path
from typing import Any

from streaming import MDSWriter

from data_prep.plan.records import Record
from data_prep.sources.source import Item

_LABEL_AND_PATH = {"label": "int", "path": "str"}
_LARGEST_SHARD = (1 << 32) - 1  # offsets are uint32
_USUAL_SHARD = 1 << 28


class _ShardWriter(MDSWriter):
    """MDSWriter, without an empty shard before a first sample above the limit."""

    def flush_shard(self) -> None:
        """Write the collected samples, if any."""
        if self.new_samples:
            super().flush_shard()


class BlockWriter:
    """Writes the samples of a block in the given order; ``finish`` adds the shards to its record.

    ``columns`` are encodings besides label and path, in Streaming's terms. The ``num_bytes`` of the
    source files become one shard unless they grow a lot.
    """

    def __init__(self, folder: Path, columns: dict[str, str], num_bytes: int) -> None:
        self._folder, self._written = folder, folder / "written"
        # Streaming can verify the hashes during download: validate_hash="sha256"
        self._writer = _ShardWriter(
            columns={**columns, **_LABEL_AND_PATH},
            out=str(self._written),
            size_limit=min(max(2 * num_bytes, _USUAL_SHARD), _LARGEST_SHARD),
            hashes=["sha256"],
        )

    def write(self, item: Item, sample: dict[str, Any]) -> None:
        """Append one sample, given by column."""
        path = item.name.encode("utf-8", "backslashreplace").decode()
        self._writer.write({**sample, "label": item.label, "path": path})

    def finish(self, record: Record) -> None:
        """Write the rest, and give the shards names that no other block uses."""
        # not MDSWriter.finish: the index is written for all blocks, and it sleeps a second if its
        # thread is late
        self._writer.flush_shard()
        self._writer.executor.shutdown()
        for place, shard in enumerate(self._writer.shards):
            behind = f".{place:05d}" if place else ""
            name = f"shard.{record.number:05d}{behind}.mds"
            (self._written / shard["raw_data"]["basename"]).rename(self._folder / name)
            shard["raw_data"]["basename"] = name
            record.shards.append(shard)

    def abort(self) -> None:
        """Stop the writer's threads."""
        self._writer.cancel_future_jobs()
