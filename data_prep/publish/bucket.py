"""MDS shards written directly to a bucket.

Each block's shard is uploaded when finished, and then removed here; its record follows in the
folder ``.pospre`` of the same address. When all blocks are there, our description is uploaded and,
last, ``index.json``: before that, readers see no data set.

A block's key is part of the names of its shard and record, so nothing else is written to these
names. A data set that is replaced stays complete and readable until the new ``index.json`` is
uploaded, and is only removed afterwards.
"""

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

from boto3.s3.transfer import TransferConfig

from data_prep.plan.plan import Plan
from data_prep.plan.records import Record
from data_prep.publish.description import check_sizes, describe_shards
from data_prep.publish.destination import PLAN_NAME, Destination
from pospre.data.stores.description import SIDECAR_NAME, Description, parse_description
from pospre.data.stores.mds_index import INDEX_NAME
from pospre.errors import UserError
from pospre.object_store import Bucket
from pospre.scratch import scratch
from pospre.untrusted_json import parse_object

_WORK = ".pospre"
_TRIES = 10  # boto waits longer each time: over a minute in total
_THREADS = 16
_UNFINISHED = re.compile(r"shard\.[0-9a-f]{16}\.\d{5}(\.\d{5})?\.mds")


class BucketFiles:
    """``description.Files``: the objects below an ``s3://`` address."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def open(self) -> Bucket:
        """Open the address; errors inside become ``UserError``."""
        return _open(self.uri, os.environ.get("S3_ENDPOINT_URL"), os.getpid())

    def locate(self, name: str) -> str:
        """Return the address of an object."""
        return f"{self.uri}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every object by name."""
        with self.open() as bucket:
            return bucket.list()

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small objects."""
        with self.open() as bucket, ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(bucket.read, names))

    def put(self, name: str, content: bytes) -> None:
        """Write a small object."""
        with self.open() as bucket:
            bucket.put(name, content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small object unless it exists; return whether it was written."""
        with self.open() as bucket:
            return bucket.put_if(name, content, IfNoneMatch="*") is not None

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects."""
        with self.open() as bucket:
            bucket.remove(names)

    def upload(self, file: Path, name: str) -> None:
        """Write a large object, with parallel parts, and remove the file.

        Complete arrival is checked before the index is uploaded.
        """
        config = TransferConfig(max_concurrency=4)
        with self.open() as bucket:
            bucket.client.upload_file(str(file), bucket.name, bucket.path(name), Config=config)
        file.unlink()


class BucketShards(Destination):
    """MDS shards at an ``s3://`` address; plan and records in a folder below it."""

    data: BucketFiles

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.partial = f"{self.uri}/{_WORK}"
        self.data = self.files = BucketFiles(self.uri)
        self.work = BucketFiles(self.partial)
        self._replaced: Description | None = None

    def __str__(self) -> str:
        return self.uri

    def check_free(self) -> None:
        """Refuse an address with anything besides a data set and its parts."""
        there = self.data.sizes()
        ours = {INDEX_NAME, SIDECAR_NAME, *(listed_shards(self.data, there) or ())}
        for name in there:
            if name not in ours and not _UNFINISHED.fullmatch(name):
                raise UserError(f"{self} has other objects ({name}); choose an empty prefix.")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a new folder among the system's temporary files."""
        with scratch() as folder:
            yield folder

    def keep(self, folder: Path, record: Record) -> None:
        """Upload the shards of a block, then its record."""
        for shard in record.shards:
            name = shard["raw_data"]["basename"]
            fresh = f"shard.{record.key}.{name.removeprefix('shard.')}"
            self.data.upload(folder / name, fresh)
            shard["raw_data"]["basename"] = fresh
        self.work.put(record.name, record.as_json())

    def discard(self) -> None:
        """Remove shards without an index, and the records; the plan is removed last."""
        names = self.work.sizes()
        if not names:
            return
        there = self.data.sizes()
        listed = listed_shards(self.data, there)
        if listed is not None:
            unlisted = [name for name in there if name not in listed]
            self.data.remove([name for name in unlisted if _UNFINISHED.fullmatch(name)])
        self.work.remove([name for name in names if name != PLAN_NAME])
        self.work.remove([PLAN_NAME])

    def locked(self, *, shared: bool) -> AbstractContextManager[None]:
        """Buckets have no locks.

        Two runs of one conversion write the same bytes under the same names; other runs' changes
        are checked before the index is uploaded.
        """
        return nullcontext()

    def description(self) -> Description | None:
        """Return the description that matches the index, which is uploaded last."""
        there = self.files.sizes()
        if INDEX_NAME not in there:
            return None
        if SIDECAR_NAME not in there:
            raise UserError(
                f"{self.uri} has a data set that was not made by this command; choose another DST."
            )
        remedy = "Remove the data set there, or choose another DST."
        (text,) = self.files.read([SIDECAR_NAME])
        content = parse_description(text, self.files.locate(SIDECAR_NAME), "mds", remedy)
        # otherwise a run was killed between description and index
        is_listed = listed_shards(self.data, there) == set(content.manifest or ())
        return content if is_listed else None

    def check_replaceable(self) -> None:
        """Refuse to replace other data; record what may be replaced."""
        self._replaced = self.description()

    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Upload the descriptions, the index last; then remove what they replace."""
        texts = describe_shards(plan, records)
        new = parse_description(texts[SIDECAR_NAME].encode(), self, "mds", "")
        if self.description() not in (None, self._replaced, new):
            raise UserError(
                f"{self.uri} has another data set; choose another DST, or replace it with "
                "--overwrite."
            )
        begun = self.plan()
        if begun is None or begun.key != plan.key:
            raise UserError(
                f"another conversion has taken over {self.uri}; choose another DST for one of them."
            )
        noted = {name: (size, digest) for record in records for name, size, digest in record.files}
        check_sizes(self.files, noted, "Run the same command again.")
        there = self.files.sizes()
        old = listed_shards(self.data, there) or set()
        for name, text in texts.items():
            self.files.put(name, text.encode())
        self.files.remove(sorted(name for name in old if name in there and name not in noted))
        self.discard()


@cache
def _open(uri: str, endpoint: str | None, pid: int) -> Bucket:
    """Open an address once per process: boto takes a tenth of a second for it."""
    return Bucket(uri, patience=_TRIES)


def listed_shards(files: BucketFiles, there: dict[str, int]) -> set[str] | None:
    """Return the shards of the existing data set; None if its index is damaged."""
    if INDEX_NAME not in there:
        return set()
    try:
        shards = parse_object(*files.read([INDEX_NAME]))["shards"]
        return {shard["raw_data"]["basename"] for shard in shards}
    except (ValueError, TypeError, KeyError):
        return None
