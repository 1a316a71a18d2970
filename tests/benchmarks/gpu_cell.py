"""One cell of ``gpu_report.py``: a recipe's own training for some steps, in a process of its own.

    python -m tests.benchmarks.gpu_cell ASKED      # on several ranks: composer -n N -m …

The cell says which recipe and what of it is changed. Its measurement is written beside it on rank
0. What goes wrong is written as well: running out of memory is a result.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.batch import Batch
from pospre.data.decode.bit_depth import Decoding
from pospre.data.loader import ViewLoader
from pospre.data.views.options import ViewGroup
from pospre.planning.kernels import count_flops
from pospre.planning.step_costs import FakeTraining
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.run.device import build_device
from pospre.training.build import Components, build_components, make_components, resolve
from pospre.training.data import build_views
from tests.benchmarks.bench_methods import make_batch
from tests.benchmarks.loader_worker import memory
from tests.training.fitting import fit

_MANY = 1_000_000  # batches that the synthetic loader has


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


class Meter(Callback):
    """Times the first step, those after a warm-up, and what of these was waiting for the loader."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.losses: list[float] = []
        self.seconds = self.waited = self.first = 0.0
        self._begun = self._asked = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Note when the first step begins, which may compile."""
        self._begun = _now()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._asked = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Note how long it took; what comes behind the last step of the warm-up counts."""
        if len(self.losses) >= self.warm_up:
            self.waited += time.perf_counter() - self._asked

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note the loss, which Composer has fetched, and the time since the warm-up."""
        self.losses.append(float(state.total_loss_dict["loss/train/total"]))
        if len(self.losses) == 1:
            self.first = _now() - self._begun
        if len(self.losses) == self.warm_up:
            self._begun, self.waited = _now(), 0.0

    def fit_end(self, state: State, logger: Logger) -> None:
        """Note how long the steps after the warm-up took."""
        self.seconds = _now() - self._begun


def _now() -> float:
    """Return the time when all that was asked of the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def synthetic(recipe: Recipe) -> Components:
    """Return what a trainer is made of, over a random batch instead of the recipe's data."""
    recipe, device, views = resolve(recipe), build_device(recipe), build_views(recipe)
    size = recipe.data.batch_size // dist.get_world_size()
    loader = Synthetic(views, size, recipe.encoder.channels, device.name == "gpu")
    return make_components(recipe, device, cast(ViewLoader, loader))


def measure(recipe: Recipe, *, real: bool, warm_up: int) -> dict[str, Any]:
    run = build_components(recipe) if real else synthetic(recipe)
    meter = Meter(warm_up)
    trainer = fit(run, meter)
    steps = len(meter.losses) - warm_up
    on_gpu = run.device.name == "gpu"
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else memory()[1])
    dist.all_reduce(peak := run.device.tensor_to_device(peak), reduce_operation="MAX")
    return {
        "images_per_s": steps * recipe.data.batch_size / meter.seconds,
        "peak_bytes": int(peak),
        "data_wait": meter.waited / meter.seconds,
        "first_step": meter.first,
        "losses": meter.losses,
        "microbatch": trainer.state.device_train_microbatch_size,
        "flops_per_image": _flops_per_image(recipe),
        "world": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else 0,
        "torch": torch.__version__,
    }


def _flops_per_image(recipe: Recipe, samples: int = 16) -> float:
    training = FakeTraining(recipe)
    step = partial(training.forward_backward, training.batch(samples))
    return count_flops(step) / samples


def main(path: Path) -> int:
    """Measure the cell described in a file; rank 0 writes the outcome beside it."""
    cell = json.loads(path.read_text())
    with tempfile.TemporaryDirectory(prefix="pospre-cell-") as folder:
        recipe = load_recipe(cell["recipe"], [*cell["overrides"], f"trainer.run_folder={folder}"])
        world = dist.get_world_size()
        batch = {"batch_size": cell["device_batch"] * world}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=batch)})
        try:
            outcome = measure(recipe, real=cell["real"], warm_up=cell["warm_up"])
        except torch.OutOfMemoryError:
            outcome = {"failed": "out of memory"}
    if dist.get_global_rank() == 0:
        path.with_suffix(".out").write_text(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
