"""MDS shards in a bucket (``s3://bucket/folder``), fetched into a local cache while reading.

A shard is downloaded completely, once per machine, and verified against the data set's description.
Its samples are then read like those of a local data set. Streaming's own ``StreamingDataset`` is
not used. It keeps its state in shared memory, which survives killed runs and stops the next. Its
workers wait for each other without a time limit.
"""

import io
import json
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from botocore.exceptions import BotoCoreError, ClientError
from torch import Tensor

from pospre.data.bucket.cache import ShardCache, cache_root
from pospre.data.bucket.download import Download, Refused
from pospre.data.bucket.fetcher import Fetcher
from pospre.data.stores.description import SIDECAR_NAME
from pospre.data.stores.mds import MdsReader
from pospre.data.stores.mds_index import INDEX_NAME, ShardEntry, parse_index
from pospre.data.stores.reader import Visits
from pospre.errors import UserError
from pospre.object_store import Bucket, Stored, s3_patience

_OPENING_SILENCE = 20.0  # seconds without a byte of the small files until an error
_LONGEST_SILENCE = 20.0  # seconds without a byte after which an attempt has failed
_MOST_BYTES = 1 << 30  # of a small file
_TAGS_NAME = "tags.json"
_LOOKS, _AT_ONCE = 3, 16  # attempts, and concurrent requests, for the tags of single shards


class RemoteMdsReader(MdsReader):
    """Reads MDS shards from a bucket; see ``Storage`` for its options.

    Attributes:
        path: the local folder of the shards.
        visits: what this machine's ranks read in every epoch.
        visited: the shards of these samples.
        stays: whether all of them fit into the cache.
    """

    def __init__(
        self, address: str, *, cache_dir: str | Path | None = None, cache_limit: int | None = None
    ) -> None:
        self._address = address.rstrip("/")
        self.remedy = (
            f"Copy the data set to {self.address} again, or convert again with "
            f"`python -m data_prep.convert SRC {self.address} --format mds`."
        )
        patience = s3_patience()
        bucket = Bucket(self.address, patience=1, timeout=min(_LONGEST_SILENCE, patience / 4))
        contents = _small_files(bucket, patience)
        there = self._shards_there(
            bucket, parse_index(contents[INDEX_NAME], self.address, self.remedy)
        )
        if there:
            stamps = {name: object_.stamp for name, object_ in sorted(there.items())}
            contents[_TAGS_NAME] = json.dumps(stamps).encode()
        self._cache = cache = ShardCache(cache_root(cache_dir), self.address, contents, cache_limit)
        self.path = cache.path
        self._describe(cache.path)
        self._cache_limit = cache_limit
        sizes = [max(entry.raw.size, entry.stored.size) for entry in self._entries]
        self._largest = max(sizes)
        if cache_limit is not None and cache_limit < 2 * self._largest:
            raise UserError(
                f"data.cache_limit = {cache_limit} is less than two shards of {self.address}, "
                f"which take up to {self._largest} bytes each; set a higher limit."
            )
        if cache_limit is not None and cache_limit >= sum(sizes):
            cache.limit = None  # never reached, so shards need no protection from eviction
        tags = {name: object_.tag for name, object_ in there.items()}
        self._fetcher = Fetcher(bucket, self._entries, cache, patience, tags)

    @property
    def address(self) -> str:
        """``s3://bucket/folder``."""
        return self._address

    @property
    def downloaded(self) -> int:
        """Bytes downloaded by this reader."""
        return self._fetcher.downloaded

    @property
    def remote_bytes(self) -> int:
        """Bytes of all shards in the bucket."""
        return sum(entry.stored.size for entry in self._entries)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of all shards in the cache."""
        return sum(entry.raw.size for entry in self._entries)

    def expect(self, indices: np.ndarray) -> None:
        """Fetch in advance the shards of these samples, int64 (n,), in order."""
        self._fetcher.expect(np.searchsorted(self._ends, indices, side="right"))

    def close(self) -> None:
        """Stop all downloads; waiting readers get an error. ``expect`` starts again."""
        self._fetcher.close()

    def heal(self, index: int) -> bool:
        """Fetch a shard again if it has changed in the cache."""
        return self._fetcher.heal(self._locate(index)[0])

    def prepare(self, visits: Visits) -> None:
        """Refuse an order that would download most shards many times in an epoch."""
        self.visits = visits
        self.visited = [self._entries[part] for part in visits.parts]
        self._fetcher.share = visits.share
        limit = math.inf if self._cache_limit is None else self._cache_limit
        all_bytes = sum(entry.raw.size for entry in self.visited)
        self.stays = all_bytes <= limit
        if self.stays:
            return
        if visits.order == "random":
            raise UserError(
                f"data.cache_limit = {self._cache_limit} is less than the {all_bytes} bytes of "
                f"{self.address} that this machine reads, but data.order = random needs all of "
                "them at all times. Set data.order: windows, or a higher limit."
            )
        # two windows, as the next one is fetched while one is read; see pospre.data.order
        mean_samples = len(self) / len(self._entries)
        num_shards = 2 * (int(visits.window // mean_samples) + 2) * len(visits.shard_groups)
        needed = num_shards * self._largest
        if needed > limit:
            raise UserError(
                f"data.cache_limit = {self._cache_limit} is less than the {num_shards} shards of "
                f"up to {self._largest} bytes that data.window needs, {visits.window} samples for "
                f"each group read here: {needed}. Set a smaller window or a higher limit."
            )

    def cached_bytes(self) -> int:
        """Return the bytes, as stored in the bucket, of the visited shards in the cache."""
        return sum(entry.stored.size for entry in self.visited if self._cache.holds(entry.raw))

    def _shard_name(self, shard_index: int) -> str:
        return f"{self.address}/{self._entries[shard_index].stored.name}"

    def _data(self, index: int) -> Tensor:
        shard_index, number = self._locate(index)
        return self._fetcher.read(shard_index, number)

    def _shards_there(self, bucket: Bucket, entries: Sequence[ShardEntry]) -> dict[str, Stored]:
        """Return what the bucket has of the shards without recorded hashes, by name.

        Raises:
            UserError: a shard is missing or has another size.
        """
        unknown = [entry.stored.name for entry in entries if not entry.is_hashed]
        try:
            objects = bucket.look(below=any("/" in entry.stored.name for entry in entries))
        except (BotoCoreError, ClientError):  # it may not be listed
            if not unknown:
                return {}
            patient = Bucket(self.address, patience=_LOOKS)
            with patient, ThreadPoolExecutor(_AT_ONCE) as pool:
                return dict(zip(unknown, pool.map(patient.look_at, unknown), strict=True))
        for entry in entries:
            shard = objects.get(entry.stored.name)
            if shard is None or shard.size != entry.stored.size:
                state = (
                    f"has {shard.size} bytes instead of {entry.stored.size}"
                    if shard
                    else ("is missing")
                )
                raise UserError(f"shard {self.address}/{entry.stored.name} {state}. {self.remedy}")
        return {name: objects[name] for name in unknown}


def _small_files(bucket: Bucket, patience: float) -> dict[str, bytes]:
    """Download the descriptions of a data set; ours may be missing.

    For 14 million images it has 75 MB, and all ranks read it at the same time.
    """
    contents = {}
    for name in (INDEX_NAME, SIDECAR_NAME):
        content, download = io.BytesIO(), Download(bucket, name, _MOST_BYTES)
        try:
            problem = download.run(
                content, patience=patience, stop=threading.Event(), silence=_OPENING_SILENCE
            )
        except Refused as error:
            if name == INDEX_NAME and error.status == 404:
                raise UserError(
                    f"{error}: {bucket.uri} is not a folder of MDS shards, or its conversion was "
                    "not finished."
                ) from error
            if name == INDEX_NAME:
                raise
            continue  # without permission to list, a bucket answers 403 for missing objects
        if problem:
            raise UserError(f"{download.address} is damaged: {problem}.")
        contents[name] = content.getvalue()[: download.done]  # an earlier attempt may be longer
    return contents
