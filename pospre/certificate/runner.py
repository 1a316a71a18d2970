"""The runs of a certificate: each with its processes, one after the other, and their kills."""

import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pospre.certificate.processes import (
    KILLED,
    STOPPED,
    Kill,
    Pace,
    Process,
    describe,
    is_due,
    send_when_due,
    start,
)
from pospre.certificate.step_records import Job, ProcessRecord, read_record
from pospre.errors import UserError
from pospre.run.checkpoints.folders import checkpoints_in


@dataclass(frozen=True)
class Stage:
    """A run of a certificate."""

    name: str  # of its folder
    title: str  # in the table
    overrides: tuple[str, ...] = ()
    kills: tuple[Kill, ...] = ()  # that end its processes, all but the last
    ranks: tuple[int, ...] = (1,)  # of its processes in turn; the last number is for all others
    elsewhere: tuple[str, ...] = ()  # further overrides for every second process
    exact: bool = True  # losses and state must equal the reference's bit for bit
    reference: str | None = None  # the undisturbed run to compare with; None: it is one itself


@dataclass
class Done:
    """A finished run."""

    processes: list[ProcessRecord]
    ends: list[str]  # how each except the last ended
    whole: list[int]  # the step of the newest complete checkpoint that each of these left
    values: Path  # of the final weights
    seconds: float
    pace: Pace  # of its last process


@dataclass
class Runner:
    """Runs stages one after another."""

    recipe: str
    run_name: str
    overrides: tuple[str, ...]  # for every stage
    folder: Path  # of a folder for each stage
    save_folder: str | None  # of checkpoints in a bucket; None: only local ones
    work: Callable[[Job], None]  # that each process runs

    def run(self, stage: Stage, pace: Pace) -> Done:
        """Run a stage to its end, at the undisturbed run's pace."""
        folder, began = self.folder / stage.name, time.monotonic()
        checkpoints = folder / self.run_name / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        jobs, ends, whole = list[Job](), list[str](), list[int]()
        for kill in [*stage.kills, None]:
            jobs.append(self._job(stage, len(jobs)))
            process = start(self.work, jobs[-1])
            end = _wait(stage, process, kill, pace, jobs[-1].log, checkpoints)
            _say(stage, len(jobs), end, process)
            if not end:
                break
            ends.append(end)
            whole.append(next((each.batch for each in checkpoints_in(str(checkpoints))), 0))
        records = [read_record(job.records) for job in jobs]
        last = records[-1]
        seconds = statistics.median(last.seconds) if last.seconds else pace.step
        pace = Pace(max(last.first - process.started, 0.0), seconds)
        return Done(records, ends, whole, jobs[-1].values, time.monotonic() - began, pace)

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


def _wait(
    stage: Stage, process: Process, kill: Kill | None, pace: Pace, log: Path, checkpoints: Path
) -> str:
    """Wait for a process; return how it was killed, or an empty text if it finished the run."""
    end = ""
    if kill is not None:
        number = signal.SIGTERM if kill.kind == "SIGTERM" else signal.SIGKILL
        if send_when_due(process, partial(is_due, kill, process, pace, checkpoints), number):
            end = describe(kill, process, checkpoints)
    code = process.wait()
    if code not in ((0, KILLED, STOPPED) if end else (0,)):
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        words = said[-1].removeprefix("error: ").rstrip(".") if said else "without output"
        raise UserError(
            f"run '{stage.name}' of the certificate ended with exit code {code}"
            f"{f' ({end})' if end else ''}: {words}. Its full output is in {log}"
        )
    process.look()
    return end


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
