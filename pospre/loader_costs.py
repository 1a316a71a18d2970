"""Measurement of a recipe's loading costs on this machine, stage by stage."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from pospre.augment.device import DeviceAugment, ViewDraws
from pospre.data.loader import ViewLoader
from pospre.data.threads import available_cores, one_thread
from pospre.data.views.crop_plan import first_view
from pospre.recipe.recipe import Recipe
from pospre.run.device import build_device
from pospre.training.data import build_data, check_addresses
from pospre.training.start_encoder import with_encoder

if TYPE_CHECKING:
    from pospre.data.bucket.reader import RemoteMdsReader

WORK = ("read", "decode", "resize", "plan")  # stages of the loader
STAGES = (*WORK, "copy", "augment", "other")  # of a single core that does everything
WAITING = ("wait", "copy", "augment", "step")  # of a consumer with loading threads
_LEAST_BATCHES = 8


@dataclass
class StageTimes:
    """Times of some images."""

    images: int = 0
    seconds: float = 0.0  # wall-clock time from the first to the last
    stages: dict[str, float] = field(default_factory=dict)  # seconds; they sum to ``seconds``


@dataclass
class RemoteCosts:
    """Additional costs of data in a bucket."""

    num_bytes: int  # of all shards in the bucket
    unpacked_bytes: int  # of all shards in the cache
    cache_limit: int | None  # maximal bytes of the recipe's cache; None: unlimited
    downloaded: int  # bytes, while measuring
    fetched_per_s: float  # images per second at the first visit, with the recipe's threads


@dataclass
class LoaderCosts:
    """Loading costs of a recipe on this machine."""

    path: str  # of the data set
    format: str
    samples: int
    views: int  # per image
    repeats: int  # of each sample in a row
    device: str  # for augmentation
    augment_threads: int  # torch's, for the consumer's augmentation; irrelevant on a GPU
    workers: int  # threads of the recipe
    cores: int  # available to this process
    batch: int  # images per batch while measuring
    alone: StageTimes  # of a single core that does everything
    loaded_per_s: float  # images, by the recipe's threads with a consumer that does nothing
    feed: float | None  # images per second that ``consumer`` takes if it never waits; None: all
    consumer: StageTimes  # that copies and augments what the recipe's threads load
    bytes_per_image: float  # encoded
    left_out: int = 0  # bad samples skipped while measuring
    remote: RemoteCosts | None = None  # None for local data

    @property
    def per_core(self) -> float:
        """Images per second that one core loads, without copy and augmentation."""
        return self.alone.images / sum(self.alone.stages[stage] for stage in WORK)

    @property
    def scaling(self) -> float:
        """Share of ``per_core`` that each core reaches when all threads work."""
        busy = max(1, min(self.workers, self.cores))
        return self.loaded_per_s / busy / self.per_core

    def cores_for(self, rate: float) -> float:
        """Return the cores needed for this many images per second, with the measured scaling."""
        return rate / (self.per_core * min(1.0, self.scaling))

    @property
    def bytes_per_epoch(self) -> float:
        """Encoded bytes of an epoch's samples; repeated samples count once."""
        return self.bytes_per_image * -(-self.samples // self.repeats)

    @property
    def hint(self) -> str:
        """A hint that makes loading cheaper, from the slowest stage."""
        remote, stages = self.remote, self.alone.stages
        if remote and remote.cache_limit is not None and remote.cache_limit < remote.unpacked_bytes:
            return (
                f"every epoch downloads again; data.cache_limit={remote.unpacked_bytes} is enough"
            )
        if self.feed is not None and self.loaded_per_s < self.feed and self.workers < self.cores:
            return f"leave data.num_workers out to use all {self.cores} cores"
        slowest = max(WORK, key=stages.__getitem__)
        if slowest == "read" and self.format == "folder":
            remedy = "convert the folder to .beton or MDS (data_prep.convert)"
        else:
            remedy = {
                "read": "copy the data to a faster disk",
                "decode": "store smaller images (data_prep.convert --max-side)",
                "resize": "use fewer or smaller views",
                "plan": "use fewer views",
            }[slowest]
        share = stages[slowest] / sum(stages[stage] for stage in WORK)
        return f"{slowest} is {share:.0%} of loading; {remedy}"


def measure(recipe: Recipe, num_images: int, feed: float | None = None) -> LoaderCosts:
    """Measure the loading costs.

    Args:
        recipe: its data, views, seed and device count are used.
        num_images: number of images, processed several times.
        feed: images per second that this machine's trainers take, if known.

    Raises:
        UserError: the data cannot be read, or are fewer than a batch, or their address would send
            the value of a variable that is not trusted.
    """
    check_addresses(recipe)
    recipe = with_encoder(recipe)
    loader = build_data(recipe)
    # small batches, so that a recipe with a large batch takes no more images than requested
    some = min(num_images, loader.num_samples)
    loader.batch_size = min(loader.batch_size, max(1, some // _LEAST_BATCHES))
    remote = _remote_reader(recipe, loader)
    fetched_per_s = 0.0 if remote is None else _loaded_per_s(loader, num_images)
    loader.epoch = 0
    loaded_per_s = _loaded_per_s(loader, num_images)
    device = _Device(recipe, loader)
    workers, threads = loader.threads, torch.get_num_threads()
    # with local files each run takes other samples, as epochs do; remote ones are now in the cache
    step = int(remote is None)
    loader.epoch = step
    consumer = _time_consumer(device, num_images, feed)
    loader.epoch = 2 * step
    alone = _time_one_core(device, num_images)
    return LoaderCosts(
        path=loader.reader.address,
        format=loader.reader.format,
        samples=loader.num_samples,
        views=sum(group.count for group in loader.groups),
        repeats=loader.repeats,
        device=device.device.type,
        augment_threads=threads,
        workers=workers,
        cores=available_cores(),
        batch=loader.batch_size,
        alone=alone,
        loaded_per_s=loaded_per_s,
        feed=feed,
        consumer=consumer,
        bytes_per_image=loader.timing.num_bytes / loader.timing.num_images,
        left_out=len(loader.bad),
        remote=None
        if remote is None
        else RemoteCosts(
            num_bytes=remote.remote_bytes,
            unpacked_bytes=remote.unpacked_bytes,
            cache_limit=recipe.data.cache_limit,
            downloaded=remote.downloaded,
            fetched_per_s=fetched_per_s,
        ),
    )


def _remote_reader(recipe: Recipe, loader: ViewLoader) -> "RemoteMdsReader | None":
    if "://" not in recipe.data.path:
        return None
    from pospre.data.bucket.reader import RemoteMdsReader  # boto3 is only for remote data

    assert isinstance(loader.reader, RemoteMdsReader)
    return loader.reader


class _Device:
    """Copies a batch and augments its views, as training does before its step."""

    def __init__(self, recipe: Recipe, loader: ViewLoader) -> None:
        self.loader, self.seed = loader, recipe.seed
        self.device = torch.device("cuda" if build_device(recipe).name == "gpu" else "cpu")
        mean, std, channels = recipe.data.mean, recipe.data.std, recipe.encoder.channels
        self._augment = DeviceAugment(mean, std, channels=channels).to(self.device)

    def take(self, batch: Any) -> tuple[float, float, float]:
        """Return the times at which the batch was received, copied, and augmented."""
        there = self._clock()
        moved = {key: value.to(self.device) for key, value in batch.items()}
        copied = self._clock()
        groups = () if self.loader.reader.features is not None else self.loader.groups
        for group in groups:
            first = first_view(groups, group.name)
            source = ViewDraws(self.seed, moved["epoch"], moved["index"], first, group.count)
            pixels, flips = moved[f"{group.name}/image"], moved[f"{group.name}/flip"]
            self._augment(pixels, flips, group.augment, source)
        return there, copied, self._clock()

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _some_batches(loader: ViewLoader, num_images: int, skipped: int) -> Iterator[tuple[int, Any]]:
    """Yield batches with numbers; those of warm-up batches are below 0."""
    wanted = skipped + max(1, round(num_images / loader.batch_size))
    return enumerate(islice(loader, min(len(loader), wanted)), -min(skipped, len(loader) - 1))


def _loaded_per_s(loader: ViewLoader, num_images: int) -> float:
    """Run the recipe's threads as in training, with a consumer that does nothing."""
    seen, begin = 0, time.perf_counter()
    for number, batch in _some_batches(loader, num_images, 1):
        end = time.perf_counter()  # not after the loop, which waits for threads to end
        if number < 0:
            begin = end
            continue
        seen += len(batch["index"])
    return seen / (end - begin)


def _time_consumer(device: _Device, num_images: int, feed: float | None) -> StageTimes:
    """Measure how long a consumer waits for the recipe's threads, at a pace of ``feed``."""
    timing, spent = StageTimes(), dict.fromkeys(WAITING, 0.0)
    held = device.loader.num_batches_held - 1  # prepared during the first step
    asked = begin = time.perf_counter()
    for number, batch in _some_batches(device.loader, num_images, held):
        there, copied, changed = device.take(batch)
        if feed is not None:
            time.sleep(max(0.0, there + len(batch["index"]) / feed - changed))
        stepped = time.perf_counter()
        if number < 0:
            asked = begin = stepped
            continue
        timing.images += len(batch["index"])
        steps = (there - asked, copied - there, changed - copied, stepped - changed)
        for stage, seconds in zip(spent, steps, strict=True):
            spent[stage] += seconds
        asked = stepped
        timing.seconds = stepped - begin
    timing.stages = spent
    return timing


def _time_one_core(device: _Device, num_images: int) -> StageTimes:
    """Run all stages on a single core."""
    loader, timing = device.loader, StageTimes()
    spent = dict.fromkeys(STAGES[:-1], 0.0)
    loader.threads = 0
    begin, before = time.perf_counter(), loader.timing.seconds
    with one_thread():
        for number, batch in _some_batches(loader, num_images, 1):
            there, copied, changed = device.take(batch)
            if number < 0:
                begin, before = time.perf_counter(), loader.timing.seconds
                continue
            timing.images += len(batch["index"])
            spent["copy"] += copied - there
            spent["augment"] += changed - copied
            timing.seconds, after = time.perf_counter() - begin, loader.timing.seconds
    spent |= {stage: after[stage] - before[stage] for stage in WORK}
    timing.stages = {**spent, "other": timing.seconds - sum(spent.values())}
    return timing
