"""One shard on its way into the cache, in a thread that a process need not wait for."""

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
    """The shard must wait: another process has it, or there is no room for it and later ones."""

    def __init__(self, *, no_room: bool) -> None:
        self.no_room = no_room


class Arrival:
    """A shard that a thread brings.

    Args:
        place: of the shard among all.
        entry: its description.
        bucket: where it comes from.
        patience: seconds that it may take.
        urgent: a reader waits for it. A shard that is not urgent is put off (``NotNow``) where
            another process has it or there is no room.
        stop: ends it.

    Attributes:
        download: how far it is.
        received: bytes that came over the network, those of tries that failed included.
        thread: that brings it.
        error: why it did not come.
        is_over: it came, or will not.
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

    def start(self, work: "Callable[[Arrival], None]") -> None:
        """Do the work in a thread."""
        self.thread = threading.Thread(
            target=work, args=(self,), daemon=True, name=f"pospre-fetch-{self.place}"
        )
        self.thread.start()

    def bring(self, cache: ShardCache, needs: Callable[[], dict[str, float]]) -> None:
        """Make the shard lie in the cache, whole.

        Raises:
            NotNow: it is not urgent, and not possible now.
            UserError: it cannot be had, or not in time.
            Stopped: it is no longer wanted.
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
            f"{self.download.address} is not what the data set's description says: {problem}; it "
            "was downloaded twice"
        )

    def _fill(self, path: Path) -> str:
        """Download into the shard's file; return what is wrong with what came."""
        self.download = download = Download(self._bucket, self._entry.stored.name)
        with path.open("r+b") as file:
            try:
                problem = download.run(file, patience=self._patience, stop=self._stop)
            finally:
                self.received += download.received
            file.truncate(download.done)
        return problem or unpack(path, self._entry)
