"""A plan for people: tables, and every assumption with what it means."""

from dataclasses import fields

from pospre.planning.assumptions import option
from pospre.planning.estimate import Choice, Plan, keys
from pospre.planning.gpus import GIB, GIGA, TERA
from pospre.text_table import format_table

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


def render(plan: Plan) -> str:
    """Return the whole plan as text."""
    parts = (_recipe, _passes, _settings, _microbatches, _best, _assumptions)
    return "\n\n".join(part(plan) for part in parts) + "\n"


def _recipe(plan: Plan) -> str:
    counts, recipe, machine = plan.counts, plan.recipe, plan.machine
    rows = [(name, f"{number / 1e6:.2f}") for name, number in counts.parts.items()]
    per_image = counts.steps[False].flops / GIGA
    again = counts.steps[True].flops / GIGA
    notes = [
        "",
        f"FLOPs per image    {per_image:.1f} G, forward and backward; {again:.1f} G with "
        "activation checkpointing",
        f"run                {recipe.trainer.max_duration} = {plan.steps} steps of "
        f"{recipe.data.batch_size} samples, {plan.device_batch} on each GPU; {plan.images[0]} "
        f"images ({plan.images[1]})",
        f"GPUs               {machine.gpus} × {machine.gpu.name} on {machine.nodes} "
        f"node{'s' if machine.nodes > 1 else ''}, {recipe.trainer.precision}: "
        f"{machine.gpu.peak(recipe.trainer.precision) / TERA:g} TFLOP/s each",
    ]
    title = f"{recipe.run_name}: {recipe.encoder.name} with {', '.join(recipe.algorithms)}"
    return format_table(title, ("part", "M parameters"), rows, notes)


def _passes(plan: Plan) -> str:
    rows = []
    for name, one in plan.counts.passes.items():
        patches = "drawn" if one.patches is None else str(one.patches)
        who = "teacher" if one.teacher else "student"
        rows.append((name, who, one.group, str(one.views), patches, f"{one.flops / GIGA:.1f}"))
    header = ("encoder pass", "of", "views", "an image", "patches", "GFLOPs forward")
    return format_table("Passes of the encoder, for an image", header, rows)


def _settings(plan: Plan) -> str:
    """Say of every way what the largest microbatch that fits costs."""
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


def _microbatches(plan: Plan) -> str:
    ways = _ways(plan)
    sizes = [choice.microbatch for choice in ways[0][1]]
    rows = []
    for name, group in ways:
        cells = [_gib(one.held.total) + ("" if plan.fits(one) else " ✗") for one in group]
        rows.append((name, *cells))
    header = ("GiB a GPU, microbatch", *map(str, sizes))
    return format_table("Memory by microbatch (✗: does not fit)", header, rows)


def _best(plan: Plan) -> str:
    best, feed, warning = plan.best, plan.feed(), plan.warning()
    held = [f"{name} {_gib(getattr(best.held, kind))}" for kind, name in _KINDS.items()]
    among, between = best.layout.traffic(
        plan.counts.parameters, plan.device_batch // best.microbatch
    )
    seconds = best.time
    lines = [
        f"Best: {_name(best)}, microbatch {best.microbatch}",
        "",
        f"  {' '.join(keys(best, plan.device_batch))}",
        *([] if warning is None else [f"  warning: {warning}"]),
        "",
        f"memory             {_gib(best.held.total)} GiB: {', '.join(held)}",
        f"step               {1e3 * seconds.total:.0f} ms: {1e3 * seconds.compute:.0f} forward and "
        f"backward, {1e3 * seconds.update:.1f} optimiser and teacher, {1e3 * seconds.exposed:.1f} "
        "waiting for others",
        f"communication      {(among + between) / GIGA:.2f} GB a step from each GPU, "
        f"{1e3 * seconds.communication:.1f} ms",
        f"run                {plan.images_per_s(best):.0f} images/s, {plan.days(best):.2f} days, "
        f"{plan.gpu_hours(best):.0f} GPU hours{_cost(plan)}",
        f"loader of a node   {feed['images_per_s']:.0f} images/s: {feed['cores']:.1f} cores at "
        f"{feed['decode_rate']:.0f} images/s each, {feed['bytes_per_s'] / GIGA:.2f} GB/s from disk "
        "or bucket",
    ]
    return "\n".join(lines)


def _cost(plan: Plan) -> str:
    price = plan.assumed.price_per_gpu_hour
    return "" if price is None else f", {price * plan.gpu_hours(plan.best):.0f} in all"


def _assumptions(plan: Plan) -> str:
    lines = ["Assumed; each can be given"]
    for one in fields(plan.assumed):
        value = getattr(plan.assumed, one.name)
        shown = "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        meant = f"{shown} {one.metadata['unit']}" if value is not None else shown
        lines.append(f"  {option(one.name):<22}{meant:<29} {one.metadata['reason']}")
    lines.append("Not counted: torch.compile, evaluations, checkpoints, restarts.")
    return "\n".join(lines)


def _ways(plan: Plan) -> list[tuple[str, list[Choice]]]:
    """Return the choices by their setting, larger microbatches first."""
    ways: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        ways.setdefault(_name(choice), []).append(choice)
    return list(ways.items())


def _name(choice: Choice) -> str:
    return choice.layout.name + (", checkpointing" if choice.checkpointing else "")


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"
