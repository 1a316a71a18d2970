"""How long a step waits for a save: ``PYTHONPATH=. python tests/benchmarks/bench_saves.py``.

The state of MAE with AdamW is copied, as a step does it, and written with its hashes, as a thread
does, then read. Another encoder than vits16 is an argument.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pospre
from pospre.run.checkpoints.rank_files import Part, Staging
from pospre.run.checkpoints.reading import read_checkpoint
from tests.run.checkpoints.checkpoint_files import CONTENT

_ROUNDS = 4


def main() -> int:
    """Print the seconds of each part, of the clock and of the processor, round by round."""
    content = state(sys.argv[1] if len(sys.argv) > 1 else "vits16")
    staging = Staging()
    for number in range(_ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            print(f"round {number}: {measure(content, staging, Path(folder))}", flush=True)
    return 0


def measure(content: dict[str, Any], staging: Staging, folder: Path) -> str:
    """Return what one save takes, and one reading."""
    checkpoint = folder / "ep0-ba1"
    part, copy = timed(lambda: Part(content, staging))
    _, write = timed(lambda: part.finish(checkpoint, [part.write(checkpoint)]))
    _, read = timed(lambda: read_checkpoint(str(checkpoint)))
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    return f"{size / 1e6:.1f} MB: copy {copy}; write {write}; read {read}"


def state(encoder: str) -> dict[str, Any]:
    model = pospre.PretrainModel(pospre.build_encoder(encoder), [pospre.MAE()], seed=0)
    moments = {
        name: {"exp_avg": torch.randn_like(weights), "exp_avg_sq": torch.rand_like(weights)}
        for name, weights in model.named_parameters()
    }
    optimizers = {"AdamW": {"state": moments}}
    held = {"model": model.state_dict(), "optimizers": optimizers}
    return {**CONTENT, "state": {**CONTENT["state"], **held}}


def timed(work: Callable[[], Any]) -> tuple[Any, str]:
    start = time.perf_counter(), time.process_time()
    result = work()
    clock, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    return result, f"{clock:.2f} s ({processor:.2f})"


if __name__ == "__main__":
    sys.exit(main())
