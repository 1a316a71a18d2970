"""A certificate: the same recipe undisturbed and disturbed, and whether it is the same model."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pospre.certificate.compare import check_lost, compare
from pospre.certificate.kills import Kill, Pace, draw_kills
from pospre.certificate.legs import Done, Leg, Runner
from pospre.certificate.lives import Lives, Order
from pospre.certificate.page import write
from pospre.certificate.result import Certificate, Column, Request
from pospre.recipe.recipe import Recipe, load_recipe

_OTHER_SUMS = ("trainer.microbatch_size", "trainer.compile", "trainer.fsdp")
_IN_FP32 = ("trainer.precision=fp32",)


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
    remote = recipe.trainer.save_folder if recipe.checkpoint_folder().startswith("s3://") else None
    runner = Runner(
        request.recipe,
        recipe.run_name,
        (*request.overrides, *_shortened(request)),
        folder,
        f"{remote}/certificate" if remote else None,
        Lives(live),
    )
    certificate = _run(request, runner, legs(request, recipe))
    write(certificate, folder)
    if certificate.is_green:  # of a red one everything may be looked at
        for name in (leg.name for leg in legs(request, recipe)):
            shutil.rmtree(folder / name)
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


def legs(request: Request, recipe: Recipe) -> list[Leg]:
    """Return the runs of a certificate, each behind the one it is compared with."""
    kills = tuple(draw_kills("killed", request.kills, request.steps, request.seed))
    first = Leg("undisturbed", "undisturbed")
    disturbed = [Leg("killed", f"{request.kills} kills", kills=kills, reference=first.name)]
    if len(request.ranks) > 1:
        kills = _changes("ranks", len(request.ranks) - 1, request)
        title = "ranks " + "→".join(map(str, request.ranks))
        disturbed.append(Leg("ranks", title, (), kills, request.ranks, (), False, first.name))
    for number, keys in enumerate(request.also, 1):
        exact = not any(key.startswith(_OTHER_SUMS) for key in keys)
        name, title = f"also{number}", f"every second life {' '.join(keys)}"
        kills = _changes(name, 2, request)
        disturbed.append(Leg(name, title, (), kills, (1,), keys, exact, first.name))
    if recipe.trainer.precision == "fp32" or all(leg.exact for leg in disturbed):
        return [first, *disturbed]
    # rounding to 16 bits makes more of another order of sums than fp32 does
    again = replace(first, name="undisturbed_fp32", title="undisturbed, fp32", overrides=_IN_FP32)
    in_fp32 = [
        replace(leg, title=f"{leg.title}, fp32", overrides=_IN_FP32, reference=again.name)
        for leg in disturbed
        if not leg.exact
    ]
    return [first, *(leg for leg in disturbed if leg.exact), again, *in_fp32]


def _changes(name: str, count: int, request: Request) -> tuple[Kill, ...]:
    """Return kills after equal parts of a run, so that every life trains some of it."""
    part = request.steps / (count + 1)
    drawn = draw_kills(name, count, request.steps, request.seed)
    return tuple(
        Kill(("step", "save")[place % 2], max(1, round(part * (place + 1))), kill.delay)
        for place, kill in enumerate(drawn)
    )


def _run(request: Request, runner: Runner, plan: Sequence[Leg]) -> Certificate:
    began, pace, done = time.monotonic(), Pace(10.0, 1.0), dict[str, Done]()
    columns = []
    for leg in plan:
        run = done[leg.name] = runner.run(leg, pace)
        if leg.reference is None:
            pace = run.pace
            continue
        reference = done[leg.reference]
        verdicts = compare(
            reference.lives[0],
            run.lives,
            exact=leg.exact,
            values=(reference.values, run.values),
        )
        verdicts.append(check_lost(run.lives, run.ends, run.whole))
        columns.append(Column(leg, run.ends, round(run.seconds, 1), verdicts))
    return Certificate(request, columns, round(time.monotonic() - began, 1))
