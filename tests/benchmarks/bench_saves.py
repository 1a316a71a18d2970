"""How long steps wait for a checkpoint: ``PYTHONPATH=. python tests/benchmarks/bench_saves.py``.

Trains MAE on images of noise and saves every ten steps. A save delays the step behind it, and what
is written beside the training slows a few more; both are counted against the median step.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from pospre.errors import run_command
from pospre.train import main as train

_EVERY = 10
_BEHIND = 5  # steps behind a save in which it may still be written


def main(argv: list[str] | None = None) -> int:
    """Train, and print what a save costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", default="vits16")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        code = train(
            [
                str(write_recipe(Path(folder), options)),
                f"trainer.max_duration={_EVERY * (options.saves + 1) - 1}ba",
                f"trainer.save_interval={_EVERY}ba",
                *options.overrides,
            ]
        )
        if code == 0:
            print(describe(Path(folder) / "runs" / "saves"))
        return code


def write_recipe(folder: Path, options: argparse.Namespace) -> Path:
    """Write images and a recipe for them."""
    draw = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(2 * options.batch_size):
        noise = draw.integers(0, 256, (256, 256, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "images" / f"{number}.jpg")
    recipe = {
        "run_name": "saves",
        "data": {"path": str(folder / "images"), "batch_size": options.batch_size},
        "encoder": {"name": options.encoder},
        "algorithms": {"mae": {}},
        "schedule": {"warmup": "1ba"},
        "trainer": {
            "max_duration": "1ep",
            "run_folder": str(folder / "runs"),
            "log_interval": 1,
            "progress_bar": False,
        },
    }
    path = folder / "saves.yaml"
    path.write_text(json.dumps(recipe))
    return path


def describe(run: Path) -> str:
    """Return what the lines of a run's metrics tell of its saves."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    times = {line["step"]: line["time"] for line in map(json.loads, lines)}
    steps = {step: times[step + 1] - times[step] for step in times if step + 1 in times}
    saves = [step for step in steps if step % _EVERY == 0]
    quiet = [steps[step] for step in steps if step > _EVERY and step % _EVERY >= _BEHIND]
    usual = statistics.median(quiet)
    waits = [steps[step] - usual for step in saves]
    totals = [sum(steps[step + i] - usual for i in range(_BEHIND)) for step in saves]
    size = max(path.stat().st_size for path in (run / "checkpoints").glob("**/*.*"))
    return (
        f"checkpoint of {size / 1e6:.0f} MB, step of {usual:.2f} s: the step behind a save takes "
        f"{statistics.median(waits):.2f} s longer ({', '.join(f'{wait:.2f}' for wait in waits)}), "
        f"the {_BEHIND} behind it together {statistics.median(totals):.2f} s"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
