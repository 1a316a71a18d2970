"""Run by ``composer -n 4``: a run in two copies of two shards, taken up in one copy of four.

First the last rank runs out of memory with two samples, alone and in the middle of a step.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from pospre.errors import run_command
from pospre.nn.block import Block
from pospre.train import main
from tests.training.tiny_runs import curve

RECIPE, RUNS, *OPTIONS = sys.argv[1:]
FOLDER = Path(RUNS) / "four"
forward = Block.forward


def train(*options: str) -> list[tuple[int, float, float]]:
    """Train and return the curve, as rank 0 wrote it."""
    assert run_command(lambda: main([RECIPE, *OPTIONS, "run_name=four", *options])) == 0
    dist.barrier()
    return curve(FOLDER)


def run_out_of_memory(self: Block, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if len(x) > 1 and dist.get_global_rank() == 3:
        raise torch.OutOfMemoryError("two samples")
    return forward(self, x, *arguments)


if __name__ == "__main__":
    Block.forward = run_out_of_memory  # type: ignore
    whole = train("trainer.fsdp={shard_degree: 2}", "trainer.microbatch_size=auto")
    Block.forward = forward  # type: ignore[method-assign]
    if dist.get_global_rank() == 0:  # as if it had been killed
        shutil.rmtree(FOLDER / "checkpoints" / "ep1-ba4")
    dist.barrier()
    again = train("trainer.fsdp={}", "trainer.activation_checkpointing=offload")
    for (_, loss, rate), (_, other_loss, other_rate) in zip(whole, again, strict=True):
        assert abs(other_loss - loss) <= 1e-5 * loss and other_rate == rate, (whole, again)
