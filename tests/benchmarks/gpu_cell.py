"""How fast a recipe's own trainer is on a GPU: median of windows, the first step apart, memory.

A random batch that stays in memory, or images. The trainer waits for its turn after the warm-up, so
that items compile beside each other and are timed alone.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch.profiler import ProfilerActivity, profile

from data_prep.scenes import Settings, render_scenes
from pospre.batch import Batch
from pospre.data.decode.bit_depth import Decoding
from pospre.data.loader import ViewLoader
from pospre.data.threads import available_cores
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.run.device import build_device
from pospre.training.build import Components, build_components, make_components
from pospre.training.data import build_views
from pospre.training.resolve import resolve
from pospre.training.scale.blocks import lacking_float8
from pospre.training.scale.compilation import lacking_compiler
from tests.benchmarks.bench_methods import make_batch
from tests.benchmarks.gpu_items import recipe_path
from tests.benchmarks.loader_worker import memory
from tests.training.fitting import fit

_MANY = 1_000_000  # batches that the synthetic loader has
_WINDOWS = 8
_COPIES = 8  # of each scene: an epoch is long, and few are rendered
_LOADED = 20  # batches that the loader alone is timed with
_SLOW = 0.5  # of the predicted images/s: below it, a step is profiled
_KERNELS = 10

Turn = Callable[[], None]
"""Returns when the card is free for this process."""


class Synthetic:
    """A loader that gives one random batch again and again, and costs nothing."""

    num_samples, skips_bad = _MANY, False
    identity: ClassVar[dict[str, str]] = {}

    def __init__(self, views: dict[str, ViewGroup], size: int, channels: int, pinned: bool) -> None:
        with torch.random.fork_rng(devices=[]):  # cells are compared: all have the same images
            torch.manual_seed(dist.get_global_rank())
            batch = make_batch(views, size, "cpu", channels=channels)
        self.batch = {key: value.pin_memory() if pinned else value for key, value in batch.items()}
        self.batch_size, self.bad = size, dict[int, str]()
        # of which trainer.microbatch_size: auto makes its batch
        self.reader = SimpleNamespace(decoding=Decoding(channels=channels), features=None)

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield dict(self.batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be where the run is: everywhere is alike."""


class Clock:
    """Marks moments of the work that the device is asked for; reading them waits for it."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note now; on a GPU, when what was asked of it so far is done, without waiting."""
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def __len__(self) -> int:
        return len(self._marks)

    def windows(self) -> list[float]:
        """Return the seconds of a step in each of some windows of equally many steps."""
        wait()
        width = max(1, (len(self._marks) - 1) // _WINDOWS)
        return [_between(*pair) / width for pair in pairwise(self._marks[::width])]


def _between(one: Any, other: Any) -> float:
    return one.elapsed_time(other) / 1e3 if torch.cuda.is_available() else other - one


def wait() -> None:
    """Wait until all that was asked of the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Meter(Callback):
    """Times the first step, and after the warm-up, its turn and some more steps, each step."""

    def __init__(self, turn: Turn, warm_up: int, settle: int) -> None:
        self.turn, self.warm_up, self.unmarked = turn, warm_up, warm_up + settle
        self.clock = Clock()
        self.waited = self.first = 0.0
        self._losses: list[Any] = []  # a step's are fetched during the next one
        self._begun = self._asked = 0.0

    @property
    def losses(self) -> list[float]:
        """Return the total loss of every step."""
        return [float(one["loss/train/total"]) for one in self._losses]

    def fit_start(self, state: State, logger: Logger) -> None:
        """Note when the first step begins, which may compile."""
        wait()
        self._begun = time.perf_counter()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._asked = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Note how long it took; what comes behind the last unmarked step counts."""
        if len(self._losses) >= self.unmarked:
            self.waited += time.perf_counter() - self._asked

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note the loss, and the time of a step that counts."""
        self._losses.append(state.total_loss_dict)
        done = len(self._losses)
        if done == 1:
            wait()
            self.first = time.perf_counter() - self._begun
        if done == self.warm_up:
            wait()
            torch.cuda.empty_cache()  # others that wait hold as little
            self.turn()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()  # compiling tries kernels out
        if done >= self.unmarked:
            self.clock.mark()


def synthetic(recipe: Recipe) -> Components:
    """Return what a trainer is made of, over a random batch instead of the recipe's data."""
    recipe, device, views = resolve(recipe), build_device(recipe), build_views(recipe)
    size = recipe.data.batch_size // dist.get_world_size()
    loader = Synthetic(views, size, recipe.encoder.channels, device.name == "gpu")
    return make_components(recipe, device, cast(ViewLoader, loader))


def recipe_of(asked: dict[str, Any], folder: Path, *more: str) -> Recipe:
    """Return the recipe that is asked for, with ``images`` on every rank."""
    size = asked["images"] * dist.get_world_size()
    places = [f"data.batch_size={size}", f"trainer.run_folder={folder}"]
    return load_recipe(recipe_path(asked["method"]), [*asked["overrides"], *places, *more])


def measure(asked: dict[str, Any], turn: Turn, folder: Path) -> dict[str, Any]:
    """Return the speed of a training, see ``gpu_items.training``."""
    loader = asked["loader"]
    more = []
    if loader == "scenes":
        side = 32 if asked["images"] < 32 else 224
        more = [f"data.path={scenes(folder / 'scenes', asked['images'] * _COPIES, side)}"]
    recipe = recipe_of(asked, folder, *more)
    run = synthetic(recipe) if loader == "synthetic" else build_components(recipe)
    check_possible(run)
    meter = Meter(turn, asked["warm_up"], asked["settle"])
    trainer = fit(run, meter)
    windows, images = meter.clock.windows(), recipe.data.batch_size
    seconds = statistics.median(windows)
    on_gpu = run.device.name == "gpu"
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else memory()[1])
    dist.all_reduce(peak := run.device.tensor_to_device(peak), reduce_operation="MAX")
    found = {
        "algorithms": [*recipe.algorithms],
        "images_per_s": images / seconds,
        "spread": [images / max(windows), images / min(windows)],
        "first_step": meter.first,
        "data_wait": meter.waited / (seconds * asked["steps"]),
        "peak_bytes": int(peak),
        "microbatch": trainer.state.device_train_microbatch_size,
        "losses": meter.losses,
        "world": dist.get_world_size(),
    }
    if asked["plain"]:
        plain = statistics.median(plain_loop(run, asked["settle"], asked["steps"]))
        found["plain_images_per_s"] = images / plain
        found["gap_ms"] = 1e3 * (seconds - plain)
    if loader != "synthetic":
        found["loader_images_per_s"] = alone(run.loader)
    if images / seconds < _SLOW * (asked.get("predicted") or 0.0):
        found["kernels"] = top_kernels(run)
    return found


def check_possible(run: Components) -> None:
    """Raise a ``UserError`` where the trainer would only say so, and leave something out."""
    options, device = run.recipe.trainer, run.device
    lacking = lacking_compiler(device) if options.compile else None
    if lacking is None and options.float8:
        lacking = lacking_float8(device)
    if lacking is not None:
        raise UserError(lacking)


def plain_step(run: Components) -> Callable[[Batch], None]:
    """Return a step of a plain loop over what the trainer has trained, and compiled."""
    device = torch.device("cuda" if run.device.name == "gpu" else "cpu")
    half = run.recipe.trainer.precision == "amp_bf16"
    model, optimizer = run.model.train(), run.optimizer

    def step(batch: Batch) -> None:
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = model(batch, 0.5).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.after_step(0.5)

    return step


def plain_loop(run: Components, settle: int, steps: int) -> list[float]:
    """Return the seconds of a step in windows of a plain loop."""
    step, clock = plain_step(run), Clock()
    batches = iter(run.loader)
    for number in range(settle + steps + 1):
        step(next(batches))
        if number >= settle:
            clock.mark()
    return clock.windows()


def top_kernels(run: Components) -> list[list[Any]]:
    """Return name, milliseconds and calls of what takes longest in a plain step."""
    step, batch = plain_step(run), next(iter(run.loader))
    step(batch)
    on_gpu = run.device.name == "gpu"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    wait()
    with profile(activities=[activity]) as found:
        step(batch)
        wait()

    def microseconds(one: Any) -> float:
        return float(one.self_device_time_total if on_gpu else one.self_cpu_time_total)

    most = sorted(found.key_averages(), key=microseconds, reverse=True)[:_KERNELS]
    return [[one.key[:80], round(microseconds(one) / 1e3, 3), one.count] for one in most]


def alone(loader: ViewLoader) -> float:
    """Return the images/s of a loader whose batches are thrown away."""
    batches = iter(loader)
    next(batches)
    begun, images = time.perf_counter(), 0
    for batch, _ in zip(batches, range(_LOADED), strict=False):
        images += len(batch["index"])
    return images / (time.perf_counter() - begun)


def scenes(folder: Path, number: int, side: int) -> Path:
    """Return a folder of rendered scenes, each there several times."""
    settings = Settings(number, side, 0, "train", 1)
    if dist.get_local_rank() == 0:
        render_scenes(folder, settings, num_workers=available_cores())
        for path in sorted(folder.rglob("*.jpg")):
            for copy in range(1, _COPIES):
                os.link(path, path.with_stem(f"{path.stem}-{copy}"))
    dist.barrier()
    return folder
