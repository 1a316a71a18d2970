"""A certificate: the same recipe undisturbed and disturbed, and whether it is the same model."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pospre.certificate.compare import check_lost, compare
from pospre.certificate.kills import Kill, Pace, draw_kills
from pospre.certificate.legs import Leg, Runner, check_ends
from pospre.certificate.lives import Lives, Order
from pospre.certificate.page import write
from pospre.certificate.result import Certificate, Column, Request
from pospre.output import check_output
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.data import rank_batch
from pospre.training.device import build_device, decide_precision

_OTHER_SUMS = ("trainer.microbatch_size", "trainer.compile", "trainer.fsdp")
_IN_FP32 = ("trainer.precision=fp32",)
FIRST = Leg("undisturbed", "undisturbed")


def certify(request: Request, live: Callable[[Order], None]) -> tuple[Certificate, Path]:
    """Run a recipe undisturbed and disturbed, compare, and write the certificate.

    Args:
        request: what to run.
        live: what a life does, ``life.live`` but for tests.

    Returns:
        The certificate, and its folder ``certificate`` below the recipe's run folder.

    Raises:
        UserError: the recipe cannot be trained, or a run ended by itself.
    """
    recipe = load_recipe(request.recipe, request.overrides)
    folder = recipe.run_path() / "certificate"
    check_output("the certificate", folder / "certificate.json")
    for keys in request.also:
        load_recipe(request.recipe, (*request.overrides, *keys))
    for ranks in request.ranks:
        rank_batch(recipe, ranks)  # or an error
    remote = recipe.trainer.save_folder if recipe.checkpoint_folder().startswith("s3://") else None
    runner = Runner(
        request.recipe,
        recipe.run_name,
        (*request.overrides, *_shortened(request)),
        folder,
        f"{remote}/certificate" if remote else None,
        Lives(live),
    )
    certificate = _run(request, runner, recipe)
    write(certificate, folder)
    if certificate.is_green:  # of a red one everything may be looked at
        for path in filter(Path.is_dir, folder.iterdir()):
            shutil.rmtree(path)
    return certificate, folder


def _shortened(request: Request) -> tuple[str, ...]:
    return (
        f"trainer.max_duration={request.steps}ba",
        f"trainer.save_interval={request.save_every}ba",
        "schedule.warmup=2ba",
        "evaluation={}",
        "loggers={}",
        "trainer.progress_bar=false",
        "trainer.autoresume=true",
    )


def legs(request: Request, *, coupled: str, reduced: bool) -> list[Leg]:
    """Return the runs behind the undisturbed one, each behind the one it is compared with.

    Args:
        request: what is asked for.
        coupled: what of the method looks at all samples of a forward at once, so that its losses
            depend on the number of ranks; such a run is compared with one on as many.
        reduced: the precision is not fp32, which makes more of another order of sums.
    """
    kills = tuple(draw_kills("killed", request.kills, request.steps, request.seed))
    found = [Leg("killed", f"{request.kills} kills", kills=kills, reference=FIRST.name)]
    others: list[Leg] = []
    for number, keys in enumerate(request.also, 1):
        name, title = f"also{number}", f"every second life {' '.join(keys)}"
        exact = not any(key.startswith(_OTHER_SUMS) for key in keys)
        leg = Leg(name, title, (), _changes(name, 2, request), (1,), keys, exact, FIRST.name)
        (found if exact else others).append(leg)
    kills, most = _changes("ranks", len(request.ranks) - 1, request), max(request.ranks)
    if kills and coupled:
        title = f"{most} ranks beside {most}: {coupled} see all samples of a rank"
        again = Leg("undisturbed_ranks", f"undisturbed, {most} ranks", ranks=(most,))
        found += [again, Leg("ranks", title, (), kills, (most,), (), False, again.name)]
    elif kills:
        title = "ranks " + "→".join(map(str, request.ranks))
        others.append(Leg("ranks", title, (), kills, request.ranks, (), False, FIRST.name))
    if not others or not reduced:
        return [*found, *others]
    again = replace(FIRST, name="undisturbed_fp32", title="undisturbed, fp32", overrides=_IN_FP32)
    in_fp32 = [
        replace(leg, title=f"{leg.title}, fp32", overrides=_IN_FP32, reference=again.name)
        for leg in others
    ]
    return [*found, again, *in_fp32]


def _changes(name: str, count: int, request: Request) -> tuple[Kill, ...]:
    """Return kills after equal parts of a run, so that every life trains some of it."""
    part = request.steps / (count + 1)
    drawn = draw_kills(name, count, request.steps, request.seed)
    return tuple(
        Kill(("step", "save")[place % 2], max(1, round(part * (place + 1))), kill.delay)
        for place, kill in enumerate(drawn)
    )


def _run(request: Request, runner: Runner, recipe: Recipe) -> Certificate:
    began = time.monotonic()
    done = {FIRST.name: runner.run(FIRST, Pace(10.0, 1.0))}
    first = done[FIRST.name]
    reduced = decide_precision(recipe, build_device(recipe)).trainer.precision != "fp32"
    columns = []
    for leg in legs(request, coupled=first.lives[0].coupled, reduced=reduced):
        run = done[leg.name] = runner.run(leg, first.pace)
        if leg.reference is None:
            continue
        reference = done[leg.reference]
        verdicts = compare(
            reference.lives[0],
            run.lives,
            exact=leg.exact,
            values=(reference.values, run.values),
        )
        verdicts.append(check_lost(run.lives, run.ends, run.whole))
        verdicts.append(check_ends(leg, run))
        columns.append(Column(leg, run.ends, round(run.seconds, 1), verdicts))
    return Certificate(request, columns, round(time.monotonic() - began, 1))
