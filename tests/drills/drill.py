"""A run that is killed again and again while its bucket misbehaves, and what must hold."""

import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread

import yaml

from pospre.certificate.processes import Kill, Pace, Process, describe, is_due, send_when_due, start
from pospre.certificate.runner import Runner, Stage
from pospre.certificate.step_records import Job, ProcessRecord, read_record, train_observed
from pospre.certificate.verdicts import Verdict, compare
from pospre.errors import UserError
from pospre.run.checkpoints.files import DamagedCheckpoint
from pospre.run.checkpoints.folders import checkpoints_in
from pospre.run.checkpoints.reading import read_checkpoint
from tests.conftest import write_images
from tests.data.flaky_s3 import FlakyS3, access

KINDS = ("step", "save", "upload", "start", "download")
REMOTE = "s3://bucket/run"
SAVE_EVERY = 2
_DISK_LOSSES = 6  # every sixth kill, and those of a download
_MISSED = 6  # steps after which what a kill waited for must have gone by
_PATIENCE = 600.0  # seconds for a start that the bucket refuses, the longest outage and more


@dataclass
class Tally:
    """What happened, and what should not have.

    Attributes:
        ends: how processes ended, by kind.
        lost: steps that had to be done again, of every start.
        lost_with_disk: the same where the disk had gone.
        refused: starts that ended with exit code 2 or 69, by their message.
        faults: broken promises, in words.
    """

    ends: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    lost_with_disk: list[int] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Drill:
    """The run, its disk and its bucket; ``S3_ENDPOINT_URL`` is the server behind the proxy.

    Args:
        folder: for everything.
        server: the proxy before the bucket, which the processes use.
        steps: of the run.
        seed: of the kills.
        crash: kills the server itself and starts it again after so many seconds.
    """

    def __init__(
        self,
        folder: Path,
        server: FlakyS3,
        steps: int,
        seed: int,
        crash: Callable[[float], None] | None = None,
    ) -> None:
        self.folder, self.server, self.steps, self.seed = folder, server, steps, seed
        self.tally = Tally()
        self._crash = crash
        self._crashing: Thread | None = None
        self.records: list[ProcessRecord] = []
        self._recipe = _write_recipe(folder, steps)
        self._run_folder = folder / "runs" / "tiny"
        self._checkpoints = self._run_folder / "checkpoints"
        self._jobs = 0
        self._gone = self._moving = False

    def undisturbed(self) -> tuple[ProcessRecord, Path, Pace]:
        """Run it without a bucket and without a kill."""
        runner = Runner(str(self._recipe), "tiny", (), self.folder, None, train_observed)
        done = runner.run(Stage("undisturbed", "undisturbed"), Pace(10.0, 1.0))
        return done.processes[0], done.values, done.pace

    def disturb(self, count: int, outages: dict[int, tuple[float, str]], pace: Pace) -> None:
        """Run it to its end through kills and outages.

        Args:
            count: kills.
            outages: their seconds and troubles, by the number of the kill that they come with.
            pace: of the undisturbed run.
        """
        draws = random.Random(self.seed)
        kinds = [KINDS[place % len(KINDS)] for place in range(count)]
        draws.shuffle(kinds)
        moments = sorted(draws.randint(1, self.steps - 1) for _ in kinds)
        for number, (kind, step) in enumerate(zip(kinds, moments, strict=True)):
            kill = Kill(kind, step, draws.random())
            if number in outages and self.server.storm:
                self.server.storm.outage(*outages[number])
                if self._crash is not None:
                    self._crashing = Thread(target=self._crash, args=outages[number][:1])
            if kind == "download" or draws.randrange(_DISK_LOSSES) == 0:
                self._gone = True
                shutil.rmtree(self._run_folder, ignore_errors=True)
            if not self._work(partial(self._is_due, kill, pace), partial(self._describe, kill)):
                break  # it came to its end
            if number % 10 == 9:
                print(f"{number + 1} kills, step {self._done()}", file=sys.stderr, flush=True)
        while not self._is_finished():
            self._work(lambda process: False, lambda process: "")

    def verdicts(self, reference: ProcessRecord, values: Path) -> list[Verdict]:
        """Compare all processes with the undisturbed run."""
        last = max(place for place, record in enumerate(self.records) if record.end)
        processes = self.records[: last + 1]
        ours = self.folder / "weights.npz"
        return compare(reference, processes, exact=True, values=(values, ours))

    def _work(self, due: Callable[[Process], bool], name: Callable[[Process], str]) -> bool:
        """Run one process, and tell whether it was killed; refused starts are given again."""
        began = time.monotonic()
        while time.monotonic() - began < _PATIENCE:
            expected, job = self._newest(), self._job()
            process = start(train_observed, job)
            if self._crashing is not None:
                self._crashing.start()
            killed = send_when_due(process, partial(due, process))
            code = process.wait()
            if killed:
                self.tally.ends[name(process)] += 1
            if self._crashing is not None:  # the server is there again after it
                self._crashing.join()
                self._crashing = None
            while self.server.under_way:  # what the server was given before the kill
                time.sleep(0.01)
            self._judge(read_record(job.records), expected)
            if killed or code == 0:
                return killed
            said = job.log.read_text(encoding="utf-8", errors="replace").strip()
            if code not in (2, 69) or "Traceback" in said:
                self.tally.faults.append(f"exit code {code}: {job.log} has {said[-300:]}")
            self.tally.refused[said.rpartition("error: ")[2].partition(";")[0][:120]] += 1
            time.sleep(1.0)
        raise RuntimeError(f"no process came about in {_PATIENCE:g} s; the last one: {said}")

    def _judge(self, record: ProcessRecord, expected: int) -> None:
        """Check where a process went on, and that the newest in the bucket loads as it is."""
        if record.start is not None:
            lost = self._done() - record.start
            (self.tally.lost_with_disk if self._gone else self.tally.lost).append(lost)
            if record.start != expected:
                self.tally.faults.append(f"went on from {record.start}, but {expected} was whole")
            if lost > 2 * SAVE_EVERY and not self._gone:  # one save may be under way
                self.tally.faults.append(f"lost {lost} steps before {self._done()}")
            self._gone = False
        self.records.append(record)
        for newest in checkpoints_in(REMOTE)[:1]:
            try:
                read_checkpoint(newest.uri)
            except UserError as error:
                self.tally.faults.append(f"the newest in the bucket does not load: {error}")

    def _is_due(self, kill: Kill, pace: Pace, process: Process) -> bool:
        if kill.kind == "upload" and process.begun >= kill.step:
            self._moving = self._moves("PUT")
        if kill.kind == "download":
            self._moving = self._moves("GET")
        if kill.kind in ("upload", "download"):
            return self._moving or process.begun > kill.step + _MISSED
        return is_due(kill, process, pace, self._checkpoints)

    def _describe(self, kill: Kill, process: Process) -> str:
        """Say when a kill has struck."""
        if self._moving:
            self._moving = False
            return {"upload": "in an upload", "download": "in a download"}[kill.kind]
        return describe(kill, process, self._checkpoints)

    def _moves(self, method: str) -> bool:
        """Tell whether a checkpoint is on its way."""
        places = list(self.server.under_way)
        return any(place.startswith(method) and "/ep" in place for place in places)

    def _newest(self) -> int:
        """Return the step of the newest whole checkpoint on disk or in the bucket."""
        for found in checkpoints_in(str(self._checkpoints), REMOTE):
            try:
                return read_checkpoint(found.uri).batch
            except DamagedCheckpoint:
                continue
        return 0

    def _done(self) -> int:
        """Return the last step that the last process to train has finished, or went on from."""
        for record in reversed(self.records):
            if record.steps:
                return record.steps[-1].number
            if record.start is not None:
                return record.start
        return 0

    def _is_finished(self) -> bool:
        ended = any(record.end for record in self.records)
        return ended and checkpoints_in(REMOTE)[0].batch == self.steps

    def _job(self) -> Job:
        self._jobs += 1
        records = self.folder / f"process{self._jobs:03d}"
        return Job(
            recipe=str(self._recipe),
            overrides=(f"trainer.save_folder={REMOTE}", f"trainer.run_folder={self.folder}/runs"),
            records=(records.with_suffix(".jsonl"),),
            values=self.folder / "weights.npz",
            log=records.with_suffix(".log"),
            environment={**access(self.server.url), "POSPRE_S3_PATIENCE": "60"},
        )


def _write_recipe(folder: Path, steps: int) -> Path:
    """Write a recipe of tiny steps, and its images."""
    images = write_images(folder / "images", 32, size=(48, 40))
    sizes = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}
    recipe = {
        "data": {"path": str(images), "batch_size": 4, "num_workers": 1},
        "encoder": {"name": "vit_tiny16", "image_size": 32, "patch_size": 8, "depth": 1},
        "algorithms": {"droppos": {"mask_ratio": 0.5, **sizes}},
        "schedule": {"warmup": "2ba"},
        "trainer": {
            "max_duration": f"{steps}ba",
            "save_interval": f"{SAVE_EVERY}ba",
            "keep_checkpoints": 2,
            "precision": "fp32",
            "device": "cpu",
            "progress_bar": False,
            "log_interval": 1,
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
