"""The stages of a certificate, one run each: undisturbed, killed, other ranks, other settings."""

import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pospre.certificate.processes import (
    Job,
    Kill,
    Pace,
    Process,
    ProcessServer,
    describe,
    is_due,
    send_when_due,
)
from pospre.certificate.step_records import ProcessRecord, read_record
from pospre.certificate.verdicts import Verdict
from pospre.errors import UserError

_SAVED = re.compile(r"ep\d+-ba(\d+)")
_STOPPED = 75
_TRIES = 3
_KILLED = -9


@dataclass(frozen=True)
class Stage:
    """A run of a certificate.

    Attributes:
        name: of its folder.
        title: in the table.
        overrides: for the recipe in all processes.
        kills: that end its processes, all but the last.
        ranks: of its processes in turn; the last number applies to all others.
        elsewhere: further overrides for every second process.
        exact: losses and state must equal the reference's bit for bit.
        reference: the undisturbed run to compare with; None: it is one itself.
    """

    name: str
    title: str
    overrides: tuple[str, ...] = ()
    kills: tuple[Kill, ...] = ()
    ranks: tuple[int, ...] = (1,)
    elsewhere: tuple[str, ...] = ()
    exact: bool = True
    reference: str | None = None

    @property
    def is_changing(self) -> bool:
        """Whether its processes differ in more than their kills."""
        return len(set(self.ranks)) > 1 or bool(self.elsewhere)


@dataclass
class Done:
    """A finished run.

    Attributes:
        processes: their records.
        ends: how each except the last ended.
        whole: the step of the newest complete checkpoint that each of these left.
        values: file of the final weights.
        seconds: its duration.
        pace: durations of start and step in its last process.
    """

    processes: list[ProcessRecord]
    ends: list[str]
    whole: list[int]
    values: Path
    seconds: float
    pace: Pace


@dataclass
class Runner:
    """Runs stages one after another.

    Args:
        recipe: YAML file.
        run_name: of the recipe.
        overrides: for every stage.
        folder: contains a folder for each stage.
        save_folder: of checkpoints in a bucket, with a folder for each stage; None: only local
            ones.
        processes: the server that starts the processes.
    """

    recipe: str
    run_name: str
    overrides: tuple[str, ...]
    folder: Path
    save_folder: str | None
    processes: ProcessServer

    def run(self, stage: Stage, pace: Pace) -> Done:
        """Run a stage to its end; if a kill came too late, repeat it once.

        Args:
            stage: what to run.
            pace: of the undisturbed run, which determines when a kill is due.

        Raises:
            UserError: a process ended unexpectedly.
        """
        done = self._try(stage, pace)
        for _ in range(_TRIES - 1):
            if check_ends(stage, done).holds:
                break
            done = self._try(stage, pace)
        return done

    def _try(self, stage: Stage, pace: Pace) -> Done:
        folder, began = self.folder / stage.name, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        jobs, ends, whole = list[Job](), list[str](), list[int]()
        for kill in [*stage.kills, None]:
            jobs.append(self._job(stage, len(jobs)))
            process = self.processes.start(jobs[-1])
            end = self._wait(stage, process, kill, pace, jobs[-1].log)
            _say(stage, len(jobs), end, process)
            if not end:
                break
            ends.append(end)
            whole.append(_newest(self.local_checkpoints(stage)))
        records = [read_record(job.records) for job in jobs]
        last = records[-1]
        seconds = statistics.median(last.seconds) if last.seconds else pace.step
        return Done(
            records,
            ends,
            whole,
            jobs[-1].values,
            time.monotonic() - began,
            Pace(max(last.first - process.started, 0.0), seconds),
        )

    def local_checkpoints(self, stage: Stage) -> Path:
        """Return the folder of a stage's checkpoints on this machine."""
        return self.folder / stage.name / self.run_name / "checkpoints"

    def _wait(
        self, stage: Stage, process: Process, kill: Kill | None, pace: Pace, log: Path
    ) -> str:
        """Wait for a process; return how it was killed, or an empty text if it finished the run."""
        folder, end = self.local_checkpoints(stage), ""
        if kill is not None:
            number = signal.SIGTERM if kill.kind == "SIGTERM" else signal.SIGKILL
            if send_when_due(process, partial(is_due, kill, process, pace, folder), number):
                end = describe(kill, process, folder)
        code = process.wait()
        if code not in ((0, _KILLED, _STOPPED) if end else (0,)):
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            words = said[-1].removeprefix("error: ").rstrip(".") if said else "without output"
            raise UserError(
                f"run '{stage.name}' of the certificate ended with exit code {code}"
                f"{f' ({end})' if end else ''}: {words}. Its full output is in {log}"
            )
        process.look()
        return end

    def _job(self, stage: Stage, number: int) -> Job:
        folder = self.folder / stage.name
        ranks = stage.ranks[min(number, len(stage.ranks) - 1)]
        target = f"{self.save_folder}/{stage.name}" if self.save_folder else "null"
        return Job(
            recipe=self.recipe,
            overrides=(
                *self.overrides,
                *stage.overrides,
                *(stage.elsewhere if number % 2 else ()),
                f"trainer.run_folder={folder}",
                f"trainer.save_folder={target}",
                f"trainer.overwrite={str(number == 0).lower()}",
            ),
            records=tuple(folder / f"process{number}-rank{rank}.jsonl" for rank in range(ranks)),
            values=folder / "weights.npz",
            log=folder / f"process{number}.log",
            every_weight=stage.exact,
        )


def check_ends(stage: Stage, done: Done) -> Verdict:
    """Return a verdict about how processes ended: an undisturbed run would prove nothing."""
    text = ", ".join(f"{count} {end}" for end, count in Counter(done.ends).items())
    missed = len(stage.kills) - len(done.ends)
    if missed:
        text = f"{missed} of {len(stage.kills)} kills came too late; give more --steps"
    idle = stage.is_changing and not all(process.steps for process in done.processes)
    if idle and not missed:
        text = "a process with other settings finished no step; give more --steps"
    return Verdict("ended", not (missed or idle), text)


def _newest(folder: Path) -> int:
    """Return the step of the newest checkpoint with a manifest, which is written last."""
    names = (path.relative_to(folder).as_posix() for path in folder.glob("**/*.json"))
    return max((int(found[1]) for name in names if (found := _SAVED.match(name))), default=0)


def _say(stage: Stage, number: int, end: str, process: Process) -> None:
    """Print how a process ended, on stderr."""
    of = f" of {len(stage.kills) + 1}" if stage.kills else ""
    how = f"ended {end}" if end else "came to the end"
    where = (
        f", at step {process.begun}" if process.begun else "" if end else ", nothing was left to do"
    )
    print(
        f"{stage.title}, process {number}{of}: {how}{where}, after {process.age():.1f} s",
        file=sys.stderr,
        flush=True,
    )
