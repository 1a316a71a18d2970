"""What a card with GPUs does, in the minutes that there are: the figures of most worth first.

    make gpu-minutes ARGS="--minutes 8"      # the list of gpu_items.py; again: what is missing
    make gpu-report                          # hours: every method, size and setting, on all GPUs
    make gpu-report DATA=/data/in1k.mds ARGS="--only mae dinov2"
    python -m tests.benchmarks.gpu_minutes --device cpu     # a rehearsal: everything is tiny

Each item is a process of its own. Several prepare beside each other (imports, compiling into one
cache, the first steps); then those that measure speed get the card one after another. What an item
gives is appended to --results at once, a JSON line. A later call does what the file lacks for this
card, then what was measured with other code. An item that does not fit into the time that is left
is skipped. Items that fail say so in a line, and are tried again last.

exit codes: 0 done, also if items failed; 2 a mistake in an option, or no GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import pospre
from pospre.planning import figures
from pospre.planning.gpus import GIB, GPUS
from pospre.run.checkpoints.files import revision
from pospre.run.peers.ranks import hash_of_sources
from pospre.training.scale.compilation import CACHE
from tests.benchmarks import gpu_table
from tests.benchmarks.gpu_items import ROOT, Item, grid, matching, minutes, step_of
from tests.processes import kill, started

WORK = ROOT / "runs/gpu_minutes"
RESULTS = ROOT / "tests/benchmarks/results/gpu.jsonl"
_PROCESS = "tests.benchmarks.gpu_item"
_MARGIN = 5.0  # seconds that the end of this command takes
_POLL = 0.05
_REHEARSED = 20.0  # times as long as a GPU's, a few cores may take
_RESERVE_GIB = 4.0  # of the card, that no item asks for
_FOREVER = 1e9  # seconds, without --minutes

Line = dict[str, Any]
"""Of the file of results."""


class Card(NamedTuple):
    """A kind of GPU, as its driver names it."""

    name: str
    gib: float
    known: str | None  # in ``GPUS``

    @classmethod
    def here(cls, device: str) -> "Card":
        """Return the card of this machine; on a CPU one to rehearse with."""
        if device == "cpu":
            return cls("cpu", 80.0, None)
        found = torch.cuda.get_device_properties(0)
        return cls(found.name, found.total_memory / GIB, gpu_key(found.name, found.total_memory))


def gpu_key(name: str, memory: float) -> str | None:
    """Return the key of a GPU in ``GPUS``, by the name that its driver gives."""
    words = name.upper().replace(" ", "")
    known = [key for key in GPUS if key.partition("-")[0].upper() in words]
    return min(known, key=lambda key: abs(GPUS[key].memory - memory), default=None)


@dataclass
class Running:
    """An item whose process runs."""

    item: Item
    asked: Path
    process: "subprocess.Popen[str]"
    begun: float

    def is_ready(self) -> bool:
        """Return whether it waits for the card, or has ended."""
        return self.asked.with_suffix(".ready").exists() or self.process.poll() is not None

    def outcome(self) -> Line:
        """Return what its process wrote, or the last line that it said."""
        written = self.asked.with_suffix(".out")
        if written.exists() and (text := written.read_text(encoding="utf-8")):
            return json.loads(text)
        said = self.asked.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in said.splitlines() if line.strip()]
        if any("OutOfMemoryError" in line for line in lines):
            return {"failed": "out of memory"}
        return {"failed": lines[-1][:300] if lines else f"ended with {self.process.poll()}"}


class Kit:
    """Does items until the time is over, and writes down what they give."""

    def __init__(self, options: argparse.Namespace, card: Card) -> None:
        self.options, self.card = options, card
        self.patience = _REHEARSED if options.device == "cpu" else 1.0
        started = time.monotonic() - (time.time() - psutil.Process().create_time())
        self.end = started + (60 * options.minutes if options.minutes else _FOREVER)
        self.about = {
            "card": card.name,
            "gpu": card.known,
            "date": datetime.now(UTC).date().isoformat(),
            "revision": (options.revision or revision(Path(pospre.__file__).parent) or "")[:14],
            "code": hash_of_sources(),
            "torch": torch.__version__,
        }

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - _MARGIN - time.monotonic()

    def run(self, items: Sequence[Item]) -> None:
        """Do the items in waves."""
        todo = list(items)
        while todo:
            wave, todo = self._wave(todo)
            self._do(wave)

    def _wave(self, todo: Sequence[Item]) -> tuple[list[Item], list[Item]]:
        """Return the next items that run beside each other, and the others that may still fit."""
        wave, later = list[Item](), list[Item]()
        for item in todo:
            needs = item.prepares + item.timed
            if needs > self.left:
                say(f"{item.name}: skipped; it takes {needs:.0f} s, {self.left:.0f} are left")
                continue
            both = [*wave, item]
            longest = max(one.prepares for one in both) + sum(one.timed for one in both)
            gib = sum(one.gib for one in both)
            is_full = len(wave) >= self.options.jobs or gib > self.card.gib - _RESERVE_GIB
            (later if wave and (is_full or longest > self.left) else wave).append(item)
        return wave, later

    def _do(self, wave: Sequence[Item]) -> None:
        with ExitStack() as processes:
            running = []
            for item in wave:
                try:
                    running.append(self._start(item, len(wave), processes))
                except OSError as error:
                    self._note(item, {"failed": f"cannot start: {error.strerror}"}, 0.0)
            for one in self._prepared(running):
                with suppress(BrokenPipeError):  # it has ended; what it said is noted below
                    one.process.stdin.write("go\n")  # type: ignore[union-attr]
                    one.process.stdin.flush()  # type: ignore[union-attr]
                limit = self.patience * (30 + 3 * one.item.timed)
                self._wait([one], time.monotonic() + limit, f"measuring took over {limit:.0f} s")

    def _start(self, item: Item, beside: int, processes: ExitStack) -> Running:
        """Start the process of an item; what it says goes into a file."""
        folder = Path(self.options.work)
        folder.mkdir(parents=True, exist_ok=True)
        asked = folder / f"{item.name.replace(', ', '-').replace(' ', '-').replace('/', '-')}.asked"
        for suffix in (".out", ".ready"):
            asked.with_suffix(suffix).unlink(missing_ok=True)
        wanted = {**item.asked, "predicted": self._predicted(item)}
        asked.write_text(json.dumps({"kind": item.kind, "asked": wanted}), encoding="utf-8")
        log = processes.enter_context(asked.with_suffix(".log").open("w", encoding="utf-8"))
        launcher = ["-m", "composer.cli.launcher", "-n", str(item.ranks)] if item.ranks > 1 else []
        cores = os.cpu_count() or 1
        threads = max(1, cores // beside)
        environment = {
            **os.environ,
            CACHE: str(self.options.cache),
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_COMPILE_THREADS": str(2 * threads),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *_paths()]),
        }
        command = [sys.executable, *launcher, "-m", _PROCESS, str(asked)]
        given = {"cwd": ROOT, "env": environment, "stdin": subprocess.PIPE}
        process = processes.enter_context(started(command, **given, stdout=log, stderr=log))
        return Running(item, asked, process, time.monotonic())

    def _predicted(self, item: Item) -> float | None:
        if item.kind != "train":
            return None
        return figures.predicted(step_of(item.asked), item.asked["setting"], self.card.known)

    def _prepared(self, running: Sequence[Running]) -> Iterator[Running]:
        """Wait until all are ready or have ended; yield those that wait for the card."""
        longest = max((one.item.prepares for one in running), default=0.0)
        until = time.monotonic() + self.patience * (60 + 2 * longest)
        self._wait(running, until, "preparing took too long", Running.is_ready)
        for one in running:
            if one.process.poll() is None:
                yield one

    def _wait(
        self,
        running: Sequence[Running],
        until: float,
        failed: str,
        is_so: Any = lambda one: one.process.poll() is not None,
    ) -> None:
        """Wait for processes; note what the ended ones gave, and end those that take too long."""
        waiting = list(running)
        while waiting:
            for one in [one for one in waiting if is_so(one)]:
                waiting.remove(one)
                if one.process.poll() is not None:
                    self._note(one.item, one.outcome(), time.monotonic() - one.begun)
            is_over = self.left < 0
            if waiting and (is_over or time.monotonic() > until):
                for one in waiting:
                    kill(one.process)
                    one.process.wait()
                    if is_over:
                        say(f"{one.item.name}: cut, the time is over; the next call does it")
                    else:
                        self._note(one.item, {"failed": failed}, time.monotonic() - one.begun)
                return
            time.sleep(_POLL)

    def _note(self, item: Item, outcome: Line, seconds: float) -> None:
        """Append what an item gave to the file of results, and print it in a line."""
        asked = {"kind": item.kind, "asked": item.asked, "seconds": round(seconds, 1)}
        line = {"item": item.name, **self.about, **asked, "predicted": self._predicted(item)}
        line |= outcome
        say(f"{item.name}: {gpu_table.in_words(line)}")
        try:
            append(self.options.results, line)
        except OSError as error:
            say(f"{self.options.results} cannot be written ({error.strerror}): {json.dumps(line)}")


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def say(text: str) -> None:
    print(text, flush=True)


def append(path: Path, line: Line) -> None:
    """Add a line to a file, on the disk before it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """Return the lines of a file of results, without one that was cut off."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            say(f"{path}: a line that was cut off is left out")
    return found


def missing(items: Sequence[Item], lines: Sequence[Line], about: Line) -> list[Item]:
    """Return what is still to be done on a card, the most worth first.

    That is what it never did, then what it did with other code, then what failed with this code.
    """
    same = ("item", "asked", "card")
    last = {json.dumps([line[key] for key in same]): line for line in lines if line.get("kind")}

    def rank(item: Item) -> int:
        key = json.dumps([item.name, item.asked, about["card"]])
        if (line := last.get(key)) is None:
            return 0
        is_same = line["code"] == about["code"]
        if "failed" in line:
            return 2 if is_same else 0
        return 3 if is_same else 1

    return [item for wanted in range(3) for item in items if rank(item) == wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is missing, and print the table."""
    options = _parse(argv)
    tiny = options.device == "cpu"
    cores = os.cpu_count() or 1
    items = minutes(tiny=tiny, cores=cores)
    if options.grid:
        ranks = 1 if tiny else torch.cuda.device_count()
        items = grid(tiny=tiny, ranks=ranks, data=options.data)
        if ranks > 1:
            options.jobs = 1  # ranks that wait long for others would time out
    if options.set:
        for item in items:
            if "overrides" in item.asked:
                item.asked["overrides"] += options.set
    items = matching(items, options.only)
    if options.list:
        print("\n".join(f"{one.name} ({one.prepares + one.timed:.0f} s)" for one in items))
        return 0
    kit = Kit(options, Card.here(options.device))
    todo = missing(items, read(options.results), kit.about)
    say(f"{kit.card.name}, {kit.card.gib:.0f} GiB; {len(todo)} of {len(items)} items to do")
    if kit.card.known is None:
        say("nothing is predicted for this card: it is not among those of pospre.plan")
    kit.run(todo)
    print(gpu_table.table([one for one in read(options.results) if one["card"] == kit.card.name]))
    size = sum(path.stat().st_size for path in options.cache.rglob("*") if path.is_file())
    say(f"results in {options.results}; compiled code in {options.cache}, {size / 2**20:.0f} MiB")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, help="when the command ends; without it, when all is done")
    add("--grid", action="store_true", help="every method, size and setting, on all GPUs")
    add("--data", help="images; the grid then has each item with them as well")
    add("--only", nargs="+", default=[], metavar="WORD", help="items whose names have one of these")
    add("--set", nargs="+", default=[], metavar="key=value", help="changes every recipe")
    add("--device", default="gpu", choices=("gpu", "cpu"), help="cpu: a rehearsal, tiny")
    add("--results", type=Path, help=f"JSON lines ({RESULTS.relative_to(ROOT)})")
    add("--work", type=Path, default=WORK, help="what processes say and compile (runs/…)")
    add("--cache", type=Path, help="compiled code (cache in --work)")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="processes at once")
    add("--revision", help="git's, where there is no checkout")
    add("--list", action="store_true", help="only show what would be done")
    options = parser.parse_args(argv)
    if options.device == "gpu" and not options.list and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu rehearses the command, with everything tiny")
    default = WORK / "rehearsal.jsonl" if options.device == "cpu" else RESULTS
    options.results = (options.results or default).absolute()
    options.work = options.work.absolute()
    options.cache = (options.cache or options.work / "cache").absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
