"""Does items of ``gpu_items.py`` in processes of their own, until the time is over."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import pospre
from pospre.data.threads import available_cores
from pospre.planning import figures
from pospre.planning.gpus import GIB, GPUS
from pospre.run.checkpoints.files import revision
from pospre.run.peers.ranks import hash_of_sources
from pospre.training.scale.compilation import CACHE
from tests.benchmarks import gpu_table
from tests.benchmarks.gpu_items import ROOT, Item, step_of
from tests.processes import kill, started

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
        return self.asked.with_suffix(".ready").exists() or self.has_ended()

    def has_ended(self) -> bool:
        """Return whether its process has ended."""
        return self.process.poll() is not None

    def end(self) -> None:
        """Kill its process and those that it started."""
        kill(self.process)
        self.process.wait()

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
                self._wait([one], lambda item: 30 + 3 * item.timed, Running.has_ended)

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
        threads = max(1, available_cores() // beside)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.options.device == "cpu" else {}
        environment = {
            **os.environ,
            **hidden,
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
        self._wait(running, lambda item: 40 + 1.5 * item.prepares, Running.is_ready)
        for one in running:
            if not one.has_ended():
                yield one

    def _wait(
        self,
        running: Sequence[Running],
        limit: Callable[[Item], float],
        is_so: Callable[[Running], bool],
    ) -> None:
        """Wait for processes; note what the ended ones gave, and end those that take too long."""
        waiting, begun = list(running), time.monotonic()
        while waiting:
            for one in list(waiting):
                seconds = self.patience * limit(one.item)
                if is_so(one):
                    if one.has_ended():
                        self._note(one.item, one.outcome(), time.monotonic() - one.begun)
                elif self.left < 0:
                    one.end()
                    say(f"{one.item.name}: cut, the time is over; the next call does it")
                elif time.monotonic() > begun + seconds:
                    what = "measuring" if one.is_ready() else "preparing"
                    one.end()
                    why = f"{what} took over {seconds:g} s"
                    self._note(one.item, {"failed": why}, time.monotonic() - one.begun)
                else:
                    continue
                waiting.remove(one)
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
    is_cut = path.exists() and path.read_bytes()[-1:] not in (b"\n", b"")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * is_cut + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
