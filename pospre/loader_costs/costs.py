"""What loading costs for a recipe: the numbers, and what follows from them."""

from dataclasses import dataclass, field

from pospre.loader_costs.image_sizes import ImageSizes

WORK = ("read", "decode", "resize", "plan")  # what the loader does
STAGES = (*WORK, "copy", "augment", "other")  # of one core that does everything
WAITING = ("wait", "copy", "augment", "step")  # of a consumer with threads that load


@dataclass
class StageTimes:
    """Where the time of some images went.

    Attributes:
        images: that were timed.
        seconds: from the first to the last, by the clock.
        stages: seconds by stage; they add up to ``seconds``.
    """

    images: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


@dataclass
class RemoteCosts:
    """What data in a bucket cost beside.

    Attributes:
        num_bytes: of all shards as they lie in the bucket.
        unpacked_bytes: of all shards as they lie in the cache.
        cache_limit: bytes that the recipe's cache may hold; None: all.
        downloaded: bytes, while measuring.
        fetched_per_s: images per second at the first visit, with the recipe's threads.
    """

    num_bytes: int
    unpacked_bytes: int
    cache_limit: int | None
    downloaded: int
    fetched_per_s: float

    @property
    def cache_suffices(self) -> bool:
        """Whether all shards stay on this machine."""
        return self.cache_limit is None or self.unpacked_bytes <= self.cache_limit


@dataclass
class LoaderCosts:
    """What loading costs, for one recipe on this machine.

    Attributes:
        path: the data set.
        format: of the data set.
        samples: in the data set.
        views: per image.
        repeats: of each sample in a row.
        order: of the samples, as in the recipe.
        device: where pixels are augmented.
        augment_threads: of torch, for the consumer's augment; on a GPU it does not matter.
        workers: threads of the recipe.
        cores: that this process may use.
        batch: images in a batch, while measuring.
        alone: one core that does everything.
        loaded_per_s: images per second of the recipe's threads, for a consumer that costs nothing.
        feed: images per second that ``consumer`` takes if it never waits; None: as many as it can.
        consumer: who copies and augments what the recipe's threads load.
        bytes_per_image: encoded.
        lanes: that the samples are dealt to, as in the recipe.
        left_out: bad samples left out while measuring.
        sizes: of the images; None for features.
        remote: None for data on this machine's disks.
        advice: what would make it cheaper.
    """

    path: str
    format: str
    samples: int
    views: int
    repeats: int
    order: str
    device: str
    augment_threads: int
    workers: int
    cores: int
    batch: int
    alone: StageTimes
    loaded_per_s: float
    feed: float | None
    consumer: StageTimes
    bytes_per_image: float
    lanes: int = 1
    left_out: int = 0
    sizes: ImageSizes | None = None
    remote: RemoteCosts | None = None
    advice: list[str] = field(default_factory=list)

    @property
    def per_core(self) -> float:
        """Images per second that one core loads alone, without copy and augment."""
        return self.alone.images / sum(self.alone.stages[stage] for stage in WORK)

    @property
    def scaling(self) -> float:
        """How much of ``per_core`` each core keeps when all threads work."""
        busy = max(1, min(self.workers, self.cores))
        return self.loaded_per_s / busy / self.per_core

    def cores_for(self, rate: float) -> float:
        """Return how many cores load so many images per second, as the threads scaled here."""
        return rate / (self.per_core * min(1.0, self.scaling))

    @property
    def bytes_per_epoch(self) -> float:
        """Encoded bytes of an epoch's samples; one that is repeated counts once."""
        return self.bytes_per_image * -(-self.samples // self.repeats)
