"""Cost of saves, start and end of a run: ``PYTHONPATH=. python tests/benchmarks/bench_stops.py``.

ViT-S/16 with MAE is trained with checkpoints on an S3 of this machine: with saves and without, in
turn. Then the disk is lost, and the run resumes from the bucket. Arguments, each with a default:
steps, steps between saves, images of a step, rounds; and changes of the recipe, key=value.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RECIPE = "yamls/pretrain/mae_vits16.yaml"


def main(steps: int, interval: int, batch: int, rounds: int, *changes: str) -> int:
    import boto3
    import numpy as np
    from PIL import Image

    from tests.data.flaky_s3 import access, moto_server

    with moto_server() as port, tempfile.TemporaryDirectory() as name:
        os.environ |= access(url := f"http://127.0.0.1:{port}")
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
        folder, generator = Path(name), np.random.default_rng(0)
        for number in range(4 * batch):
            pixels = generator.integers(0, 256, (256, 256, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.jpg")
        for turn in range(rounds):
            for run, every in ((f"without{turn}", 10 * steps), (f"saves{turn}", interval)):
                options = (f"trainer.save_interval={every}ba", f"trainer.max_duration={steps}ba")
                train(folder, batch, run, *options, *changes)
        shutil.rmtree(folder / "runs" / run)
        train(folder, batch, run, f"trainer.max_duration={steps + 4}ba", *changes)
    return 0


def train(folder: Path, batch: int, run: str, *options: str) -> None:
    """Train in a process of its own, and print where its time went."""
    given = [f"data.path={folder}", f"data.batch_size={batch}", "data.num_workers=1"]
    given += ["schedule={warmup: 1ba}", "trainer.log_interval=1", "trainer.progress_bar=false"]
    given += [f"run_name={run}", f"trainer.run_folder={folder}/runs", "trainer.device=cpu"]
    given += [f"trainer.save_folder=s3://bucket/{run}", "callbacks.collapse=null", *options]
    start, environment = time.time(), {**os.environ, "PYTHONPATH": "."}
    command = [sys.executable, __file__, "--timed", str(folder / "times"), _RECIPE, *given]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    end = time.time()
    times = json.loads((folder / "times").read_text())
    metrics = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, metrics) if line["time"] > start]
    pairs = list(itertools.pairwise(lines))
    saving = sum((new["time"] - old["time"]) * new["time/save"] for old, new in pairs)
    seconds = lines[-1]["time"] - lines[0]["time"]
    first = ", ".join(f"{name} {when - start:.1f}" for name, when in times.items())
    print(
        f"{run}: {len(pairs)} steps in {seconds:.1f} s, {saving:.2f} s of it in saves "
        f"({saving / seconds:.1%}); seconds from the start to the end of: {first}, first step "
        f"{lines[0]['time'] - start:.1f}; from the last upload to the exit "
        f"{end - times['uploads']:.1f} s",
        flush=True,
    )


def timed_training(path: Path, arguments: list[str]) -> int:
    """Train, and write when the parts of the start and the uploads ended."""
    from pospre import train as command
    from pospre.run.checkpoints.uploads import Uploads
    from pospre.run.run import Run
    from pospre.training import train

    times = {"imports": time.time()}

    def note(place: Any, function: str, name: str) -> None:
        work: Callable[..., Any] = getattr(place, function)

        def noted(*given: Any, **options: Any) -> Any:
            result = work(*given, **options)
            times[name] = time.time()
            return result

        setattr(place, function, noted)

    note(train, "build_components", "model and data")
    note(Run, "find", "checkpoint read")
    note(train, "build_trainer", "checkpoint loaded")
    note(Uploads, "finish", "uploads")
    code = command.main(arguments)
    path.write_text(json.dumps(times))
    return code


if __name__ == "__main__":
    if "--timed" in sys.argv:
        sys.exit(timed_training(Path(sys.argv[2]), sys.argv[3:]))
    numbers = [int(value) for value in sys.argv[1:] if "=" not in value]
    overrides = [value for value in sys.argv[1:] if "=" in value]
    steps, every, batch, rounds = numbers + [36, 12, 16, 2][len(numbers) :]
    sys.exit(main(steps, every, batch, rounds, *overrides))
