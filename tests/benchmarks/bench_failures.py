"""Time that a failure costs: ``PYTHONPATH=. python tests/benchmarks/bench_failures.py``.

A recipe is trained on two ranks of this machine. Half-way between two saves one of them is killed,
or stops answering; then the same command is given again. Arguments: the recipe, and changes of it,
key=value.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.conftest import write_images

INTERVAL = 10  # steps between saves
_FAILURES = {"killed": signal.SIGKILL, "silent": signal.SIGSTOP}
_PAUSE = 0.02  # seconds between two looks


def main(recipe: str = "yamls/demo/mae.yaml", *changes: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images", 64)
        given = [recipe, f"data.path={folder}/images", "data.batch_size=16", "data.num_workers=1"]
        given += ["schedule={warmup: 1ba}", "trainer.log_interval=1", "trainer.progress_bar=false"]
        given += [f"trainer.save_interval={INTERVAL}ba", f"trainer.max_duration={2 * INTERVAL}ba"]
        given += [f"trainer.run_folder={folder}", "trainer.device=cpu", *changes]
        for run, number in _FAILURES.items():
            measure(folder / run, number, [*given, f"run_name={run}"])
    return 0


def measure(run: Path, number: signal.Signals, given: Sequence[str]) -> None:
    """Train, let a rank fail, train on, and print how long everything took."""
    failing = INTERVAL + INTERVAL // 2
    with launch(given) as process:
        wait_for(failing, run, process, since=0.0)
        failed = time.time()
        rank_of(process, 1).send_signal(number)
        code = process.wait()
    again = time.time()
    with launch(given) as process:
        first, last = (wait_for(n, run, process, since=again) for n in (INTERVAL + 1, failing))
        process.wait()
    print(
        f"a rank is {run.name}: exit code {code} after {again - failed:.1f} s; from the next start "
        f"to the end of the first step {first - again:.1f} s; {last - first:.1f} s for the other "
        f"{failing - INTERVAL - 1} lost steps; load {os.getloadavg()[1]:.0f}",
        flush=True,
    )


def launch(given: Sequence[str]) -> "subprocess.Popen[bytes]":
    command = [str(Path(sys.executable).with_name("composer")), "-n", "2", "-m", "pospre.train"]
    return subprocess.Popen([*command, *given], stdout=subprocess.DEVNULL, stderr=sys.stderr)


def rank_of(launcher: "subprocess.Popen[bytes]", rank: int) -> psutil.Process:
    children = psutil.Process(launcher.pid).children()
    return next(each for each in children if each.environ().get("RANK") == str(rank))


def wait_for(step: int, run: Path, process: "subprocess.Popen[bytes]", since: float) -> float:
    """Wait until a step has been logged after ``since``, and return when."""
    metrics = run / "metrics.jsonl"
    while True:
        text = metrics.read_text("utf-8") if metrics.exists() else ""
        for line in map(json.loads, text.rpartition("\n")[0].splitlines()):
            if line["step"] == step and line["time"] > since:
                return line["time"]
        if process.poll() is not None:
            raise SystemExit(f"training ended with {process.returncode} before step {step}")
        time.sleep(_PAUSE)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
