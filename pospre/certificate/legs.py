"""The runs of a certificate: undisturbed, killed, on other ranks, elsewhere."""

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

from pospre.certificate.compare import Verdict
from pospre.certificate.kills import Kill, Pace, describe, is_due, send_when_due
from pospre.certificate.lives import Life, Lives, Order
from pospre.certificate.records import LifeRecord, read_life
from pospre.errors import UserError

_SAVED = re.compile(r"ep\d+-ba(\d+)")
_STOPPED = 75
_TRIES = 3
_KILLED = -9


@dataclass(frozen=True)
class Leg:
    """A run of a certificate.

    Attributes:
        name: what its folder is called.
        title: what the table calls it.
        overrides: of the recipe in all of its lives.
        kills: how its lives end, but for the last.
        ranks: of its lives in turn; the last number holds for all that follow.
        elsewhere: further overrides of every second life.
        exact: losses and state must be the reference's to the bit.
        reference: the undisturbed run that it is compared with; None: it is one itself.
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
        """Whether its lives differ in more than their ends."""
        return len(set(self.ranks)) > 1 or bool(self.elsewhere)


@dataclass
class Done:
    """A run that came to its end.

    Attributes:
        lives: what each wrote down.
        ends: how each but the last ended.
        whole: the step of the newest whole checkpoint that each of these left.
        values: file of the final weights.
        seconds: that it took.
        pace: how long a start and a step took in its last life.
    """

    lives: list[LifeRecord]
    ends: list[str]
    whole: list[int]
    values: Path
    seconds: float
    pace: Pace


@dataclass
class Runner:
    """Runs legs one after another.

    Args:
        recipe: YAML file.
        run_name: of the recipe.
        overrides: of every leg.
        folder: where the legs go, each into a folder of its own.
        save_folder: of the checkpoints in a bucket, a folder for each leg; None: local ones only.
        lives: what starts the processes.
    """

    recipe: str
    run_name: str
    overrides: tuple[str, ...]
    folder: Path
    save_folder: str | None
    lives: Lives

    def run(self, leg: Leg, pace: Pace) -> Done:
        """Run a leg to its end; once more from the start where a kill came too late.

        Args:
            leg: what to run.
            pace: of the undisturbed run; it says when a kill is due.

        Raises:
            UserError: a life ended by itself before the end.
        """
        done = self._try(leg, pace)
        for _ in range(_TRIES - 1):
            if check_ends(leg, done).holds:
                break
            done = self._try(leg, pace)
        return done

    def _try(self, leg: Leg, pace: Pace) -> Done:
        folder, began = self.folder / leg.name, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        orders, ends, whole = list[Order](), list[str](), list[int]()
        for kill in [*leg.kills, None]:
            orders.append(self._order(leg, len(orders)))
            life = self.lives.start(orders[-1])
            end = self._wait(leg, life, kill, pace, orders[-1].log)
            _say(leg, len(orders), end, life)
            if not end:
                break
            ends.append(end)
            whole.append(_newest(self.local_checkpoints(leg)))
        records = [read_life(order.records) for order in orders]
        last = records[-1]
        seconds = statistics.median(last.seconds) if last.seconds else pace.step
        return Done(
            records,
            ends,
            whole,
            orders[-1].values,
            time.monotonic() - began,
            Pace(max(last.first - life.started, 0.0), seconds),
        )

    def local_checkpoints(self, leg: Leg) -> Path:
        """Return where a leg's checkpoints are on this machine."""
        return self.folder / leg.name / self.run_name / "checkpoints"

    def _wait(self, leg: Leg, life: Life, kill: Kill | None, pace: Pace, log: Path) -> str:
        """Let a life end as it shall; return how it did, empty where it came to the run's end."""
        folder, end = self.local_checkpoints(leg), ""
        if kill is not None:
            number = signal.SIGTERM if kill.kind == "SIGTERM" else signal.SIGKILL
            if send_when_due(life, partial(is_due, kill, life, pace, folder), number):
                end = describe(kill, life, folder)
        code = life.wait()
        if code not in ((0, _KILLED, _STOPPED) if end else (0,)):
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            words = said[-1].removeprefix("error: ").rstrip(".") if said else "it said nothing"
            raise UserError(
                f"run '{leg.name}' of the certificate ended with exit code {code}"
                f"{f' ({end})' if end else ''}: {words}. All it said is in {log}"
            )
        life.look()
        return end

    def _order(self, leg: Leg, number: int) -> Order:
        folder = self.folder / leg.name
        ranks = leg.ranks[min(number, len(leg.ranks) - 1)]
        target = f"{self.save_folder}/{leg.name}" if self.save_folder else "null"
        return Order(
            recipe=self.recipe,
            overrides=(
                *self.overrides,
                *leg.overrides,
                *(leg.elsewhere if number % 2 else ()),
                f"trainer.run_folder={folder}",
                f"trainer.save_folder={target}",
                f"trainer.overwrite={str(number == 0).lower()}",
            ),
            records=tuple(folder / f"life{number}-rank{rank}.jsonl" for rank in range(ranks)),
            values=folder / "weights.npz",
            log=folder / f"life{number}.log",
            every_weight=leg.exact,
        )


def check_ends(leg: Leg, done: Done) -> Verdict:
    """Return a verdict about how lives ended: a run that was not disturbed proves nothing."""
    text = ", ".join(f"{count} {end}" for end, count in Counter(done.ends).items())
    missed = len(leg.kills) - len(done.ends)
    if missed:
        text = f"{missed} of {len(leg.kills)} kills came too late; give more --steps"
    idle = leg.is_changing and not all(life.steps for life in done.lives)
    if idle and not missed:
        text = "a life that was to train otherwise finished no step; give more --steps"
    return Verdict("ended", not (missed or idle), text)


def _newest(folder: Path) -> int:
    """Return the step of the newest checkpoint that has its manifest, which is written last."""
    names = (path.relative_to(folder).as_posix() for path in folder.glob("**/*.json"))
    return max((int(found[1]) for name in names if (found := _SAVED.match(name))), default=0)


def _say(leg: Leg, number: int, end: str, life: Life) -> None:
    """Print how a life ended, on stderr."""
    of = f" of {len(leg.kills) + 1}" if leg.kills else ""
    how = f"ended {end}" if end else "came to the end"
    where = f", at step {life.begun}" if life.begun else "" if end else ", nothing was left to do"
    print(
        f"{leg.title}, life {number}{of}: {how}{where}, after {life.age():.1f} s",
        file=sys.stderr,
        flush=True,
    )
