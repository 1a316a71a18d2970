"""MDS shards, written by Streaming's own MDSWriter, one block at a time.

Finished blocks of both formats are stored like this; a ``.beton`` is made from its shards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def block_writer(
    folder: Path, columns: dict[str, str], num_bytes: int, record: Record
) -> Iterator[Callable[[Item, dict[str, Any]], None]]:
    """Yield a function that appends a sample, given by column, to a block in ``folder``.

    ``columns`` are encodings besides label and path, in Streaming's terms. The ``num_bytes`` of the
    source files become one shard unless they grow a lot. At the end the shards are added to the
    record, with names that no other block uses.
    """
    written = (folder / "written").absolute()  # Streaming takes v2:photos for an address
    # Streaming can verify the hashes during download: validate_hash="sha256"
    writer = _ShardWriter(
        columns={**columns, **_LABEL_AND_PATH},
        out=str(written),
        size_limit=min(max(2 * num_bytes, _USUAL_SHARD), _LARGEST_SHARD),
        hashes=["sha256"],
    )

    def write(item: Item, sample: dict[str, Any]) -> None:
        path = item.name.encode("utf-8", "backslashreplace").decode()
        writer.write({**sample, "label": item.label, "path": path})

    try:
        yield write
        # not MDSWriter.finish: the index is written for all blocks, and it sleeps a second if its
        # thread is late
        writer.flush_shard()
        writer.executor.shutdown()
    except BaseException:
        writer.cancel_future_jobs()
        raise
    for index, shard in enumerate(writer.shards):
        behind = f".{index:05d}" if index else ""
        name = f"shard.{record.number:05d}{behind}.mds"
        (written / shard["raw_data"]["basename"]).rename(folder / name)
        shard["raw_data"]["basename"] = name
        record.shards.append(shard)
