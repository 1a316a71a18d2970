"""A plan as text for a terminal, and as plain values for JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pospre.docstrings import meanings
from pospre.output import format_table
from pospre.planning.figures import Figure, of
from pospre.planning.gpus import (
    GIB,
    GIGA,
    GPUS,
    TERA,
    Assumptions,
    option,
)

if TYPE_CHECKING:  # --help and a mistyped key answer without torch
    from pospre.planning.estimate import Choice, Plan

_KINDS = {
    "weights": "weights",
    "teacher": "teachers",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "batch": "images",
    "working": "activations",
    "exchange": "exchange",
    "reserve": "reserve",
}


def as_json(plan: "Plan") -> dict[str, Any]:
    """Return the whole plan as plain values; bytes, seconds and FLOPs."""
    counts = plan.counts
    return {
        "recipe": plan.recipe.run_name,
        "machine": asdict(plan.machine),
        "assumptions": asdict(plan.assumed),
        "images": plan.images[0],
        "images_from": plan.images[1],
        "steps": plan.steps,
        "counts": {
            "parameters": counts.parts,
            "passes": {name: asdict(one) for name, one in counts.passes.items()},
            "flops_per_image": counts.steps[False].flops,
            "flops_per_image_with_checkpointing": counts.steps[True].flops,
            "optimizer_bytes": counts.optimizer_bytes,
            "sample_bytes": counts.sample_bytes,
        },
        "choices": [_choice(plan, choice) for choice in plan.choices],
        "best": _choice(plan, plan.best),
        "keys": plan.best.keys(plan.device_batch),
        "stages": [{**asdict(one), "time": one.time.total} for one in plan.stages],
        "warning": plan.warning(),
        "loader_of_a_node": plan.feed(),
        "measured": [asdict(one) for one in _figures(plan)],
    }


def _choice(plan: "Plan", choice: "Choice") -> dict[str, Any]:
    cost = plan.assumed.price_per_gpu_hour
    return {
        "layout": choice.layout.name,
        "activation_checkpointing": choice.checkpointing,
        "microbatch": choice.microbatch,
        "bytes": {**choice.held._asdict(), "total": choice.held.total},
        "fits": plan.fits(choice),
        "seconds": {**choice.time._asdict(), "total": choice.time.total},
        "images_per_s": plan.images_per_s(choice),
        "days": plan.days(choice),
        "gpu_hours": plan.gpu_hours(choice),
        "cost": None if cost is None else cost * plan.gpu_hours(choice),
    }


def render(plan: "Plan") -> str:
    """Return the whole plan as text."""
    parts = (_recipe, _passes, _settings, _microbatches, _best, _stages, _measured, _assumptions)
    return "\n\n".join(filter(None, (part(plan) for part in parts))) + "\n"


def _recipe(plan: "Plan") -> str:
    counts, recipe, machine = plan.counts, plan.recipe, plan.machine
    rows = [(name, f"{number / 1e6:.2f}") for name, number in counts.parts.items()]
    per_image = counts.steps[False].flops / GIGA
    again = counts.steps[True].flops / GIGA
    peak = machine.gpu.fp32 if recipe.trainer.precision == "fp32" else machine.gpu.bf16
    notes = [
        "",
        f"FLOPs per image    {per_image:.1f} G, forward and backward; {again:.1f} G with "
        "activation checkpointing",
        f"run                {recipe.trainer.max_duration} = {plan.steps} steps of "
        f"{recipe.data.batch_size} samples, {plan.device_batch} on each GPU; {plan.images[0]} "
        f"images ({plan.images[1]})",
        f"GPUs               {machine.gpus} × {machine.gpu.name} on {machine.nodes} "
        f"node{'s' if machine.nodes > 1 else ''}, {recipe.trainer.precision}: "
        f"{peak / TERA:g} TFLOP/s each",
    ]
    title = f"{recipe.run_name}: {recipe.encoder.name} with {', '.join(recipe.algorithms)}"
    return format_table(title, ("part", "M parameters"), rows, notes)


def _passes(plan: "Plan") -> str:
    rows = []
    for name, one in plan.counts.passes.items():
        patches = "drawn" if one.patches is None else str(one.patches)
        who = "teacher" if one.teacher else "student"
        rows.append((name, who, one.group, str(one.views), patches, f"{one.flops / GIGA:.1f}"))
    header = ("encoder pass", "of", "views", "an image", "patches", "GFLOPs forward")
    return format_table("Passes of the encoder, for an image", header, rows)


def _settings(plan: "Plan") -> str:
    """Return the cost of each layout with its largest microbatch that fits."""
    rows = []
    for _, group in _ways(plan):
        fitting = [choice for choice in group if plan.fits(choice)]
        shown = fitting[0] if fitting else group[-1]
        time = (f"{1e3 * shown.time.total:.0f}", f"{1e3 * shown.time.exposed:.0f}")
        rate = (f"{plan.images_per_s(shown):.0f}", f"{plan.days(shown):.2f}")
        costs = (*time, *rate) if fitting else ("–",) * 4
        rows.append((_name(shown), str(shown.microbatch), _gib(shown.held.total), *costs))
    memory = plan.machine.gpu.memory / GIB
    header = ("setting", "microbatch", "GiB", "ms a step", "ms waiting", "images/s", "days")
    return format_table(
        f"The largest microbatch that fits into {memory:.1f} GiB (–: not even the smallest does)",
        header,
        rows,
        ["ms waiting: for other GPUs; part of the step"],
    )


def _microbatches(plan: "Plan") -> str:
    ways = _ways(plan)
    sizes = [choice.microbatch for choice in ways[0][1]]
    rows = []
    for name, group in ways:
        cells = [_gib(one.held.total) + ("" if plan.fits(one) else " ✗") for one in group]
        rows.append((name, *cells))
    header = ("GiB a GPU, microbatch", *map(str, sizes))
    return format_table("Memory by microbatch (✗: does not fit)", header, rows)


def _best(plan: "Plan") -> str:
    best, feed, warning = plan.best, plan.feed(), plan.warning()
    held = [f"{name} {_gib(getattr(best.held, kind))}" for kind, name in _KINDS.items()]
    among, between = best.layout.bytes_sent(
        plan.counts.parameters, plan.device_batch // best.microbatch
    )
    seconds = best.time
    lines = [
        f"Best: {_name(best)}, microbatch {best.microbatch}",
        "",
        f"  {' '.join(best.keys(plan.device_batch))}",
        *([] if warning is None else [f"  warning: {warning}"]),
        "",
        f"memory             {_gib(best.held.total)} GiB: {', '.join(held)}",
        f"step               {1e3 * seconds.total:.0f} ms: {1e3 * seconds.compute:.0f} forward and "
        f"backward, {1e3 * seconds.update:.1f} optimiser and teacher, {1e3 * seconds.exposed:.1f} "
        "waiting for others",
        f"communication      {(among + between) / GIGA:.2f} GB a step from each GPU, "
        f"{1e3 * seconds.communication:.1f} ms",
        f"run                {plan.images_per_s(best):.0f} images/s, {_short(plan.days(best))} "
        f"days, {_short(plan.gpu_hours(best))} GPU hours{_cost(plan)}",
        f"loader of a node   {feed['images_per_s']:.0f} images/s: {feed['cores']:.1f} cores at "
        f"{feed['decode_rate']:.0f} images/s each, {feed['bytes_per_s'] / GIGA:.2f} GB/s from disk "
        "or bucket",
    ]
    return "\n".join(lines)


def _stages(plan: "Plan") -> str:
    """Return the cost of every stage in the best setting; "" if the recipe has none."""
    if not plan.stages:
        return ""
    rows = []
    for one in plan.stages:
        ms, hours = 1e3 * one.time.total, one.steps * one.time.total / 3600
        numbers = (f"{one.trained / 1e6:.2f}", f"{one.flops / GIGA:.1f}", f"{ms:.0f}")
        rows.append((one.words, str(one.steps), *numbers, f"{hours:.2f}"))
    header = ("trains", "steps", "M parameters", "GFLOPs an image", "ms a step", "hours")
    title = "Stages; all above but days and hours is for the most expensive"
    return format_table(title, header, rows)


def _figures(plan: "Plan") -> list[Figure]:
    """Return what was measured of the recipe's method and encoder on a GPU of this kind."""
    recipe, gpu = plan.recipe, plan.machine.gpu
    kind = next((name for name, each in GPUS.items() if each == gpu), None)
    return of([*recipe.algorithms], recipe.encoder.name, kind)


def _measured(plan: "Plan") -> str:
    figures, gpu = _figures(plan), plan.machine.gpu.name
    if not figures:
        return f"Measured: nothing of this method and encoder on one {gpu}; all above is predicted"
    rows = [
        (one.setting, one.loop, one.step.split()[-1], f"{one.images_per_s:.0f}", one.date)
        for one in figures
    ]
    header = ("setting", "loop", "images", "images/s", "date")
    return format_table(f"Measured on one {gpu}; all above is predicted", header, rows)


def _cost(plan: "Plan") -> str:
    price = plan.assumed.price_per_gpu_hour
    return "" if price is None else f", {_short(price * plan.gpu_hours(plan.best))} in all"


def _short(value: float) -> str:
    """Write three digits of a small number, and all before the point of a large one."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _assumptions(plan: "Plan") -> str:
    lines = ["Assumed; each can be given"]
    for name, meaning in meanings(Assumptions).items():
        value, (unit, _, reason) = getattr(plan.assumed, name), meaning.partition(": ")
        shown = "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        meant = f"{shown} {unit}" if value is not None else shown
        lines.append(f"  {option(name):<22}{meant:<29} {reason}")
    lines.append("Not counted: the time to compile, evaluations, checkpoints, restarts.")
    return "\n".join(lines)


def _ways(plan: "Plan") -> list[tuple[str, list["Choice"]]]:
    """Return the choices by their setting, larger microbatches first."""
    ways: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        ways.setdefault(_name(choice), []).append(choice)
    return list(ways.items())


def _name(choice: "Choice") -> str:
    return choice.layout.name + (", checkpointing" if choice.checkpointing else "")


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"
