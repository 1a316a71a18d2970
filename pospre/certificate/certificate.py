"""Certificates: a recipe run undisturbed and disturbed, and a comparison of the results."""

import json
import platform
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pospre.certificate.processes import Kill, Pace
from pospre.certificate.runner import Done, Runner, Stage
from pospre.certificate.step_records import Job, ProcessRecord
from pospre.certificate.verdicts import TOLERANCE, Verdict, compare
from pospre.output import check_output, markdown_table
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.run.device import build_device
from pospre.training.data import rank_batch
from pospre.training.precision import decide_precision
from pospre.training.reference import with_encoders

KINDS = ("step", "save", "start", "SIGTERM")
_OTHER_SUMS = ("trainer.microbatch_size", "trainer.compile", "trainer.fsdp")
_IN_FP32 = ("trainer.precision=fp32",)
_TRIES = 3
FIRST = Stage("undisturbed", "undisturbed")


@dataclass(frozen=True)
class Request:
    """Options of a certificate, see ``python -m pospre.certify --help``."""

    recipe: str
    overrides: tuple[str, ...] = ()
    steps: int = 12
    save_every: int = 2
    kills: int = 4
    ranks: tuple[int, ...] = (1, 2, 1)  # one number: no run with several
    also: tuple[tuple[str, ...], ...] = ()
    seed: int = 0
    ends: tuple[int, ...] = ()  # of the recipe's stages but the last, near which it is killed


@dataclass(frozen=True)
class Column:
    """A disturbed run and its verdicts."""

    stage: Stage
    ends: list[str]
    seconds: float
    verdicts: list[Verdict]


@dataclass(frozen=True)
class Certificate:
    """The request, and a verdict for every property of every disturbed run."""

    request: Request
    columns: list[Column]
    seconds: float

    @property
    def is_green(self) -> bool:
        """Whether every property of every run holds."""
        return all(verdict.holds for column in self.columns for verdict in column.verdicts)


def certify(request: Request, work: Callable[[Job], None]) -> tuple[Certificate, Path]:
    """Run a recipe undisturbed and disturbed, compare, and write the certificate.

    Each process runs ``work``, ``train_observed`` except in tests. Its folder, ``certificate`` in
    the recipe's run folder, is returned as well. A recipe that cannot be trained, or a run that
    ends unexpectedly, is a ``UserError``.
    """
    recipe = with_encoders(load_recipe(request.recipe, request.overrides))
    folder = recipe.run_path() / "certificate"
    check_output("the certificate", folder / "certificate.json")
    for keys in request.also:
        load_recipe(request.recipe, (*request.overrides, *keys))
    for ranks in request.ranks:
        rank_batch(recipe, ranks)  # raises if it does not divide
    if recipe.stages:
        count = len(recipe.stages)
        steps = max(request.steps, 2 * count)  # two for each stage
        ends = tuple(steps * number // count for number in range(1, count))
        request = replace(request, steps=steps, ends=ends)
    certificate = _run(request, recipe, folder, work)
    content = {"green": certificate.is_green, "tolerance": TOLERANCE, **asdict(certificate)}
    (folder / "certificate.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    (folder / "certificate.md").write_text(_page(certificate), "utf-8")
    if certificate.is_green:  # keep everything of a failed one for inspection
        for path in filter(Path.is_dir, folder.iterdir()):
            shutil.rmtree(path)
    return certificate, folder


def _run(
    request: Request, recipe: Recipe, folder: Path, work: Callable[[Job], None]
) -> Certificate:
    remote = recipe.trainer.save_folder if recipe.checkpoint_folder().startswith("s3://") else None
    shortened = (
        f"trainer.max_duration={request.steps}ba",
        f"trainer.save_interval={request.save_every}ba",
        "schedule.warmup=1ba",  # shorter than any stage, which may restart it
        f"stages={json.dumps(_shortened(recipe, request))}",
        "evaluation={}",
        "verdict=null",
        "loggers={}",
        "trainer.progress_bar=false",
        "trainer.autoresume=true",
    )
    overrides = (*request.overrides, *shortened)
    remote = f"{remote}/certificate" if remote else None
    runner = Runner(request.recipe, recipe.run_name, overrides, folder, remote, work)
    began = time.monotonic()
    first = runner.run(FIRST, Pace(10.0, 1.0))
    done, columns = {FIRST.name: first}, []
    reduced = decide_precision(recipe, build_device(recipe)).trainer.precision != "fp32"
    for stage in stages(request, coupled=first.processes[0].coupled, reduced=reduced):
        for _ in range(_TRIES):  # a kill may come late
            run = done[stage.name] = runner.run(stage, first.pace)
            if check_ends(stage, run).holds:
                break
        if stage.reference is None:
            continue
        reference, values = done[stage.reference], (done[stage.reference].values, run.values)
        verdicts = [
            *compare(reference.processes[0], run.processes, exact=stage.exact, values=values),
            check_lost(run.processes, run.ends, run.whole),
            check_ends(stage, run),
        ]
        columns.append(Column(stage, run.ends, round(run.seconds, 1), verdicts))
    return Certificate(request, columns, round(time.monotonic() - began, 1))


def _shortened(recipe: Recipe, request: Request) -> list[dict[str, Any]]:
    """Return the recipe's stages with ends of this run."""
    pairs = zip_longest(recipe.stages, (f"{end}ba" for end in request.ends))
    return [
        {"until": end, **stage.model_dump(include={"train", "restart", "sizes"})}
        for stage, end in pairs
    ]


def stages(request: Request, *, coupled: str, reduced: bool) -> list[Stage]:
    """Return the stages after the undisturbed one, each after the one it is compared with.

    If a part of the method couples the samples of a batch (``coupled``), losses depend on the
    number of ranks. A run is then compared with one on as many ranks, and so is one that never
    changes their number; the sum of two ranks is the same in any order. A precision that is not
    fp32 (``reduced``) amplifies a different order of sums.
    """
    near = [end + steps for end in request.ends for steps in (-1, 0, 1)]
    kills = tuple(draw_kills("killed", request.kills, request.steps, request.seed, near))
    killed = [Stage("killed", f"{request.kills} kills", kills=kills, reference=FIRST.name)]
    others: list[Stage] = []
    for number, keys in enumerate(request.also, 1):
        name, title = f"also{number}", f"every second process {' '.join(keys)}"
        exact = not any(key.startswith(_OTHER_SUMS) for key in keys)
        stage = Stage(name, title, (), _changes(name, 2, request), (1,), keys, exact, FIRST.name)
        (killed if exact else others).append(stage)
    kills, most = _changes("ranks", len(request.ranks) - 1, request), max(request.ranks)
    if kills and (coupled or len({*request.ranks}) == 1):
        why = f": {coupled} couple the samples of a rank" if coupled else ""
        title = f"{most} ranks beside {most}{why}"
        again = Stage("undisturbed_ranks", f"undisturbed, {most} ranks", ranks=(most,))
        killed += [again, Stage("ranks", title, (), kills, (most,), (), most == 2, again.name)]
    elif kills:
        title = "ranks " + "→".join(map(str, request.ranks))
        others.append(Stage("ranks", title, (), kills, request.ranks, (), False, FIRST.name))
    if not others or not reduced:
        return [*killed, *others]
    again = replace(FIRST, name="undisturbed_fp32", title="undisturbed, fp32", overrides=_IN_FP32)
    in_fp32 = [
        replace(stage, title=f"{stage.title}, fp32", overrides=_IN_FP32, reference=again.name)
        for stage in others
    ]
    return [*killed, again, *in_fp32]


def draw_kills(
    name: str, count: int, steps: int, seed: int, near: Sequence[int] = ()
) -> list[Kill]:
    """Return the kills of the run ``name`` in order of time, of all kinds if there are enough.

    They are at the steps ``near``, if there are any, otherwise at any.
    """
    draws = random.Random(f"{seed}/{name}")
    kinds = [KINDS[index % len(KINDS)] for index in range(count)]
    draws.shuffle(kinds)
    moments = sorted(draws.choice(near or range(1, max(2, steps - 1))) for _ in kinds)
    return [Kill(kind, step, draws.random()) for kind, step in zip(kinds, moments, strict=True)]


def _changes(name: str, count: int, request: Request) -> tuple[Kill, ...]:
    """Return kills that divide a run into equal parts, so that every process trains some of it."""
    part = request.steps / (count + 1)
    drawn = draw_kills(name, count, request.steps, request.seed)
    return tuple(
        Kill(("step", "save")[index % 2], max(1, round(part * (index + 1))), kill.delay)
        for index, kill in enumerate(drawn)
    )


def check_lost(
    processes: Sequence[ProcessRecord], ends: Sequence[str], whole: Sequence[int]
) -> Verdict:
    """Return a verdict about finished steps that were lost when a process ended.

    No step up to a complete checkpoint (``whole``, see ``Done``) may be lost, and none at all if a
    process could save before its end.
    """
    done, worst, bad = 0, 0, ""
    for before, after, end, kept in zip(processes[:-1], processes[1:], ends, whole, strict=True):
        done = before.steps[-1].number if before.steps else done
        if after.start is None:  # it ended before that
            continue
        lost = done - after.start
        if after.start < kept or (lost and end == "by SIGTERM"):
            bad = bad or f"{lost} of {done}, where a process ended {end}; {kept} were saved"
        worst, done = max(worst, lost), after.start
    return Verdict("steps lost", not bad, bad or f"at most {worst}, none of a whole checkpoint")


def check_ends(stage: Stage, done: Done) -> Verdict:
    """Return a verdict about how processes ended: an undisturbed run would prove nothing."""
    text = ", ".join(f"{count} {end}" for end, count in Counter(done.ends).items())
    missed = len(stage.kills) - len(done.ends)
    if missed:
        text = f"{missed} of {len(stage.kills)} kills came too late; give more --steps"
    differ = len(set(stage.ranks)) > 1 or bool(stage.elsewhere)  # in more than their kills
    idle = differ and not all(process.steps for process in done.processes)
    if idle and not missed:
        text = "a process with other settings finished no step; give more --steps"
    return Verdict("ended", not (missed or idle), text)


def headline(certificate: Certificate) -> str:
    """Return one line that says whether the certificate is green, or the first failure."""
    start = f"certificate of {certificate.request.recipe}: "
    for column in certificate.columns:
        for verdict in column.verdicts:
            if not verdict.holds:
                return f"{start}RED. {column.stage.title}: {verdict.property} {verdict.text}"
    return f"{start}green, in {certificate.seconds:.0f} s"


def table(certificate: Certificate) -> str:
    """Return the table: a row for each property, a column for each disturbed run."""
    titles = [column.stage.title for column in certificate.columns]
    cells: dict[str, list[str]] = {}
    for index, column in enumerate(certificate.columns):
        for verdict in column.verdicts:
            row = cells.setdefault(verdict.property, ["–"] * len(titles))
            row[index] = verdict.text if verdict.holds else f"**{verdict.text}**"
    rows = [["property", *titles], *([name, *row] for name, row in cells.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *padded = [[*map(str.ljust, row, widths)] for row in rows]
    return markdown_table(header, padded)


def _page(certificate: Certificate) -> str:
    asked = certificate.request
    keys = " ".join(asked.overrides)
    return f"""# {headline(certificate)}

{asked.steps} steps, a save every {asked.save_every}, seed {asked.seed} of the moments; \
python -m pospre.certify {asked.recipe} {keys}

{table(certificate)}

Compared with a run of one process that was not disturbed. Every step that a process finished is
compared, also those that were trained twice: a hash for each sample of the batch as the model got
it (ids, boxes, flips, pixels, masks with all else that was drawn), the losses, and the weights
after it.
*equal* means the same bits; *within*, where sums are taken in another order, a relative distance
of at most {TOLERANCE:g}. {platform.machine()}, {platform.system()}.
"""
