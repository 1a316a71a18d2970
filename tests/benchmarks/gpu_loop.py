"""``gpu_report.py --count``: the CPU time of the trainer's loop around a step.

A tiny MAE is trained, whose operators cost little. After each of its steps the same model takes a
plain step: draws, forward, backward, optimiser. The loop costs what a step of the trainer takes
more than its plain neighbour. CPU time of the thread is measured, as the machine may be busy.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State

from pospre.recipe.recipe import load_recipe
from pospre.training.build import Components
from tests.benchmarks.gpu_cell import synthetic
from tests.training.fitting import fit

_RECIPE = Path(__file__).parents[2] / "yamls/pretrain/mae_vitb16.yaml"
_TINY = (
    "algorithms={mae: {decoder_dim: 32, decoder_depth: 1, decoder_heads: 2}}",
    "encoder={name: vit_tiny16, depth: 1, image_size: 32}",
    "data.batch_size=2",
    "optimizer.lr_rule=none",
    "schedule.warmup=1ba",
    "schedule.length=null",
    "evaluation={}",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "trainer.progress_bar=false",
)


class _Neighbour(Callback):
    """Takes a plain step after each of the trainer's, and notes what both cost."""

    def __init__(self, run: Components) -> None:
        self.run = run
        self.loops: list[float] = []
        self._begun = time.thread_time()

    def batch_end(self, state: State, logger: Any) -> None:
        """Note the CPU seconds of the trainer's step beyond those of a plain one."""
        ended = time.thread_time()
        model, optimizer = self.run.model, self.run.optimizer
        loss = model(next(iter(self.run.loader)), 0.5).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.after_step(0.5)
        now = time.thread_time()
        self.loops.append((ended - self._begun) - (now - ended))
        self._begun = time.thread_time()


def loop_ms(steps: int = 200) -> float:
    """Return the CPU ms that the trainer's loop takes around a step: the median of ``steps``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pospre-loop-") as folder:
        length = [f"trainer.run_folder={folder}", f"trainer.max_duration={steps + 20}ba"]
        run = synthetic(load_recipe(_RECIPE, [*_TINY, *length]))
        neighbour = _Neighbour(run)
        try:
            fit(run, neighbour)
        finally:
            torch.set_num_threads(threads)
    return 1e3 * statistics.median(neighbour.loops[20:])
