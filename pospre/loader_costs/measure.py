"""Measure what loading costs for a recipe on this machine, stage by stage."""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from pospre.augment.device import DeviceAugment, ViewDraws
from pospre.data.cores import available_cores, one_thread
from pospre.data.loader import ViewLoader
from pospre.data.views.plan import first_view
from pospre.loader_costs.costs import STAGES, WAITING, WORK, LoaderCosts, RemoteCosts, StageTimes
from pospre.loader_costs.image_sizes import look_at_sizes
from pospre.recipe.recipe import Recipe
from pospre.training.data import build_data
from pospre.training.device import build_device

if TYPE_CHECKING:
    from pospre.data.bucket.reader import RemoteMdsReader

_LEAST_BATCHES = 8


def measure(recipe: Recipe, num_images: int, feed: float | None = None) -> LoaderCosts:
    """Measure what loading costs.

    Args:
        recipe: of a training; its data, views, seed and device count.
        num_images: to work through, several times.
        feed: images per second that the trainers of this machine take, if known.

    Raises:
        UserError: the data cannot be read, or are fewer than a batch.
    """
    loader = build_data(recipe)
    # In small batches: not more images than were asked for, whatever the recipe's batch.
    some = min(num_images, loader.num_samples)
    loader.batch_size = min(loader.batch_size, max(1, some // _LEAST_BATCHES))
    remote = _remote_reader(recipe, loader)
    fetched_per_s = 0.0 if remote is None else _loaded_per_s(loader, num_images)
    loader.epoch = 0
    loaded_per_s = _loaded_per_s(loader, num_images)
    device = _Device(recipe, loader)
    workers, threads = loader.threads, torch.get_num_threads()
    # Of local files each takes other samples, as epochs do; remote ones are in the cache now.
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
        order=loader.order,
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
        lanes=loader.lanes,
        left_out=len(loader.bad),
        sizes=look_at_sizes(loader.reader, loader.groups),
        remote=None if remote is None else _remote_costs(recipe, remote, fetched_per_s),
    )


def _remote_reader(recipe: Recipe, loader: ViewLoader) -> "RemoteMdsReader | None":
    if "://" not in recipe.data.path:
        return None
    from pospre.data.bucket.reader import RemoteMdsReader  # boto3 is for remote data alone

    assert isinstance(loader.reader, RemoteMdsReader)
    return loader.reader


def _remote_costs(recipe: Recipe, reader: "RemoteMdsReader", rate: float) -> RemoteCosts:
    return RemoteCosts(
        num_bytes=reader.remote_bytes,
        unpacked_bytes=reader.unpacked_bytes,
        cache_limit=recipe.data.cache_limit,
        downloaded=reader.downloaded,
        fetched_per_s=rate,
    )


class _Device:
    """Does with a batch what training does before its step: copies it and augments its views."""

    def __init__(self, recipe: Recipe, loader: ViewLoader) -> None:
        self.loader, self.seed = loader, recipe.seed
        self.device = torch.device("cuda" if build_device(recipe).name == "gpu" else "cpu")
        mean, std, channels = recipe.data.mean, recipe.data.std, recipe.encoder.channels
        self._augment = DeviceAugment(mean, std, channels=channels).to(self.device)

    def take(self, batch: Any) -> tuple[float, float, float]:
        """Return when the batch was there, when copied, and when augmented."""
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


def _some_batches(loader: ViewLoader, num_images: int, warm_up: int) -> Iterator[tuple[int, Any]]:
    """Yield batches, numbered so that those of the warm-up are below 0."""
    wanted = warm_up + max(1, round(num_images / loader.batch_size))
    return enumerate(islice(loader, min(len(loader), wanted)), -min(warm_up, len(loader) - 1))


def _loaded_per_s(loader: ViewLoader, num_images: int) -> float:
    """Let the recipe's threads work as in training, for a consumer that costs nothing."""
    seen, begin = 0, time.perf_counter()
    for number, batch in _some_batches(loader, num_images, 1):
        end = time.perf_counter()  # not after the loop, which waits for threads that end
        if number < 0:
            begin = end
            continue
        seen += len(batch["index"])
    return seen / (end - begin)


def _time_consumer(device: _Device, num_images: int, feed: float | None) -> StageTimes:
    """Measure how long a consumer waits for the recipe's threads; at ``feed`` it takes its time."""
    timing, spent = StageTimes(), dict.fromkeys(WAITING, 0.0)
    held = device.loader.num_batches_held - 1  # these are prepared during the first step
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
    """Let one core do everything."""
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
            after: Mapping[str, float] = loader.timing.seconds
            timing.seconds = time.perf_counter() - begin
    spent |= {stage: after[stage] - before[stage] for stage in WORK}
    timing.stages = {**spent, "other": timing.seconds - sum(spent.values())}
    return timing
