"""One loader in one process of its own, that runs an epoch when it is told to.

Loaders side by side in one process would share numba's threading layer, torch's threads and each
other's leftovers. Between its epochs a process is stopped altogether (SIGSTOP), its helpers too, so
that it takes nothing from the one whose turn it is.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pospre.errors import UserError

ROOT = Path(__file__).parents[2]
PEERS_FOLDER = ROOT / ".venv-bench"
_START = "POSPRE_BENCH_START"  # environment variable: when the process was started
_NUM_LINES = 25  # of what a process said before it died


class LoaderDied(UserError):
    """A process ended without an answer; the message is what it said last."""


class Views(NamedTuple):
    """Some views of the same kind of every image."""

    number: int
    size: int
    scale: tuple[float, float]


@dataclass(frozen=True)
class Job:
    """What a process shall load."""

    loader: str  # a function in ``loader_peers``
    data: str  # a path, or an address
    views: tuple[Views, ...]
    batch_size: int
    num_workers: int  # threads or processes, as the loader has it
    options: dict[str, Any] = field(default_factory=dict)  # what only this loader has


@dataclass(frozen=True)
class Epoch:
    """What one epoch took."""

    num_images: int
    seconds: float  # from asking for the epoch's iterator to its end
    first_batch: float | None  # seconds from the start of the process; first epoch only
    before: int  # bytes that the process held before its first epoch, without its children
    resident: int  # bytes that it held after this epoch
    peak: int  # the most that it ever held
    estimate: int | None  # bytes that the loader said it would take, if it does
    note: str  # what the loader says about itself

    @property
    def rate(self) -> float:
        return self.num_images / self.seconds


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a process that may import us and every installed peer."""
    paths = [str(ROOT), str(PEERS_FOLDER), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LITDATA_DISABLE_VERSION_CHECK": "1",
        **(extra or {}),
    }


class Worker:
    """The parent's end: starts a process, which runs its first epoch at once, then waits."""

    def __init__(self, job: Job, log: Path, extra: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._name = job.loader
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.loader_worker", json.dumps(asdict(job))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(extra) | {_START: str(time.monotonic())},
                process_group=0,
            )
        try:
            self.first = self._answer()
        except BaseException:  # Ctrl-C as well: no other process knows of this one yet
            self.close()
            raise

    def epoch(self) -> Epoch:
        self._signal(signal.SIGCONT)
        self._tell("epoch")
        return self._answer()

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._tell("end")
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Epoch:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = self._log.read_text(errors="replace").splitlines()[-_NUM_LINES:]
            raise LoaderDied("\n".join([f"the loader '{self._name}' died:", *said]))
        self._signal(signal.SIGSTOP)
        return Epoch(**json.loads(line))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def leave_out(name: str, reason: str) -> None:
    """Say that a peer is not measured."""
    print(f"  left out: {name}: {reason.splitlines()[-1]}", file=sys.stderr)
    if "No module named" in reason:
        print("  `make bench-setup` installs the peers", file=sys.stderr)


def take_turns(jobs: Mapping[str, Job], runs: int, folder: Path) -> dict[str, list[Epoch]]:
    """Start a process for each job, and run ``runs`` more epochs, one of each job in turn."""
    started: dict[str, Worker] = {}
    epochs: dict[str, list[Epoch]] = {}
    with contextlib.ExitStack() as stack:
        for number, (name, job) in enumerate(jobs.items()):
            try:
                started[name] = Worker(job, folder / f"{os.getpid()}-{number}.log")
            except LoaderDied as error:
                if job.loader == "ours":
                    raise
                leave_out(name, str(error))
                continue
            stack.callback(started[name].close)
            epochs[name] = [first := started[name].first]
            print(
                f"  warm-up: {name} {first.rate:.0f} images/s, "
                f"first batch after {first.first_batch or 0:.1f} s {first.note}".rstrip(),
                file=sys.stderr,
            )
        for run in range(1, runs + 1):
            for name, worker in started.items():
                epochs[name].append(worker.epoch())
                rate = epochs[name][-1].rate
                print(f"  run {run}: {name} {rate:.0f} images/s", file=sys.stderr)
    return epochs


def read_job(text: str) -> Job:
    content = json.loads(text)
    views = tuple(Views(number, size, tuple(scale)) for number, size, scale in content["views"])
    return Job(**{**content, "views": views})


def memory() -> tuple[int, int]:
    """Return the bytes of memory that this process holds, and the most it ever held."""
    # not getrusage: a child inherits the peak of the process that started it
    status = Path("/proc/self/status")
    if not status.exists():
        return 0, 0  # not Linux
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


def serve(arguments: Sequence[str]) -> int:
    """Build the job's loader, run an epoch, and one more for every line that says so."""
    from tests.benchmarks import loader_peers

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs into the log
    job = read_job(arguments[0])
    loader = getattr(loader_peers, job.loader)(job)
    estimate = loader.estimate()
    before, _ = memory()
    first_batch: float | None = None
    command = "epoch\n"
    while command == "epoch\n":
        is_first, num_images, start = first_batch is None, 0, time.perf_counter()
        for count in loader.epoch():
            num_images += count
            if first_batch is None:
                first_batch = time.monotonic() - float(os.environ[_START])
        seconds = time.perf_counter() - start
        resident, peak = memory()
        epoch = Epoch(
            num_images=num_images,
            seconds=seconds,
            first_batch=first_batch if is_first else None,
            before=before,
            resident=resident,
            peak=peak,
            estimate=estimate,
            note=loader.note(),
        )
        print(json.dumps(asdict(epoch)), file=answers, flush=True)
        command = sys.stdin.readline()
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
