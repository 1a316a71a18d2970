"""Download of one shard into the cache, in a thread that does not keep the process alive."""

import threading
from collections.abc import Callable
from pathlib import Path

from pospre.data.bucket.cache import ShardCache
from pospre.data.bucket.checks import unpack
from pospre.data.bucket.download import Download
from pospre.data.stores.mds_index import ShardEntry
from pospre.errors import UserError
from pospre.object_store import Bucket


class NotNow(Exception):
    """The shard must wait: another process has it, or there is no room before more urgent ones."""

    def __init__(self, *, no_room: bool) -> None:
        self.no_room = no_room


class ShardDownload:
    """The download of the shard ``place`` by a thread, in at most ``patience`` seconds.

    For an ``urgent`` one a reader waits. Other shards are postponed (``NotNow``) if another process
    has them or there is no room. The event ``stop`` cancels it.

    Attributes:
        received: bytes received over the network, including failed attempts.
        error: why it failed.
        is_over: whether it has finished or failed.
    """

    def __init__(
        self,
        place: int,
        entry: ShardEntry,
        bucket: Bucket,
        patience: float,
        *,
        urgent: bool,
        stop: threading.Event,
    ) -> None:
        self.place = place
        self.download = Download(bucket, entry.stored.name)
        self.received = 0
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.is_over = False
        self._entry, self._bucket, self._patience = entry, bucket, patience
        self._urgent, self._stop = urgent, stop

    def bring(self, cache: ShardCache, needs: Callable[[], dict[str, float]]) -> None:
        """Download the complete shard into the cache.

        Raises:
            NotNow: it is not urgent and not possible now.
            UserError: it cannot be downloaded, or not in time.
            Stopped: it is no longer needed.
        """
        entry = self._entry
        name, size = entry.raw.name, max(entry.raw.size, entry.stored.size)
        patience = self._patience if self._urgent else 0
        with cache.downloading(name, patience, self._stop) as is_mine:
            if not is_mine and self._urgent and not self._stop.is_set():
                raise UserError(f"another process has been downloading it for {patience:.0f} s")
            if not is_mine:
                raise NotNow(no_room=False)
            if cache.holds(entry.raw):
                return
            for _ in range(2):
                with cache.incoming(name, size, needs, urgent=self._urgent) as path:
                    if path is None:
                        raise NotNow(no_room=True)
                    problem = self._fill(path)
                    if not problem:
                        cache.publish(name)
                        return
        raise UserError(
            f"{self.download.address} does not match the data set's description: {problem}; it was "
            "downloaded twice"
        )

    def _fill(self, path: Path) -> str:
        """Download into the shard's file; return what is wrong with the content."""
        self.download = download = Download(self._bucket, self._entry.stored.name)
        with path.open("r+b") as file:
            try:
                problem = download.run(file, patience=self._patience, stop=self._stop)
            finally:
                self.received += download.received
            file.truncate(download.done)
        return problem or unpack(path, self._entry)
