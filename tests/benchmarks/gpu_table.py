"""Tables of what ``gpu_minutes.py`` measured, beside what was predicted.

    python -m tests.benchmarks.gpu_table            # of the file of results
    python -m tests.benchmarks.gpu_table --keep     # adds its speeds to pospre's figures

The figures (``pospre/planning/gpu_figures.json``) are what ``pospre.plan`` and the README know of
GPUs. With ``--keep``, the README's table is written anew; ``efficiency`` follows from them.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pospre.atomic_file import write_atomic
from pospre.output import markdown_table
from pospre.planning import figures
from pospre.planning.figures import Figure
from pospre.planning.gpus import GIB, GIGA, GPUS
from tests.benchmarks.gpu_items import ROOT, step_of

RESULTS = ROOT / "tests/benchmarks/results/gpu.jsonl"
README = ROOT / "tests/benchmarks/README.md"
_COMPARED = 10  # steps
NEAR = 0.02  # of a loss in bf16, where a single product is off by 0.4 %
NAMES = {
    **{"mae": "MAE", "simmim": "SimMIM", "ijepa": "I-JEPA", "dinov2": "DINOv2"},
    **{"droppos": "DropPos", "mp3": "MP3", "stop": "StoP", "lut": "LUT"},
    "intertwined": "Intertwined",
    **{"vits16": "ViT-S/16", "vitb16": "ViT-B/16", "vitl16": "ViT-L/16"},
}
_HEADER = (
    *("step, images on a GPU", "setting", "loop", "GPU", "floor", "predicted", "measured"),
    *("of the floor", "peak GiB", "first step, s", "measured on, code of"),
)

Line = dict[str, Any]


def in_words(line: Line) -> str:
    """Return what an item gave, in a line."""
    if "failed" in line:
        return f"failed: {line['failed']}"
    if "facts" in line:
        return "; ".join(f"{one['fact']}: {_held(one)}" for one in line["facts"])
    if line["kind"] != "train":
        return f"copy {line['copy_gb_per_s']:.0f} GB/s, bf16 {line['bf16_tflops']:.0f} TFLOP/s"
    words = [f"{line['images_per_s']:.0f} images/s ({_spread(line['spread'])})"]
    expected = predicted(line)
    if expected is not None:
        words.append(f"predicted {expected:.0f}")
    words.append(f"{line['peak_bytes'] / GIB:.1f} GiB, first step {line['first_step']:.1f} s")
    if "gap_ms" in line:
        words.append(f"plain loop {line['plain_images_per_s']:.0f} ({line['gap_ms']:+.1f} ms)")
    if "loader_images_per_s" in line:
        words.append(f"the loader alone {line['loader_images_per_s']:.0f}")
    if "kernels" in line:
        words.append("most ms: " + ", ".join(f"{name} {ms}" for name, ms, _ in line["kernels"][:3]))
    return "; ".join(words)


def _held(one: Line) -> str:
    word = {True: "pass", False: "FAIL", None: "not seen"}[one["holds"]]
    return f"{word} ({one['why']})" if one["why"] else word


def _spread(rates: Sequence[float]) -> str:
    return f"{rates[0]:.0f} to {rates[1]:.0f}"


def predicted(line: Line) -> float | None:
    """Return the images/s that were expected of a training, before it was measured."""
    found = line.get("predicted")
    return None if found is None else found * line["world"]


def table(lines: Iterable[Line]) -> str:
    """Return the newest outcome of every item: the speeds, what holds, and what failed."""
    newest = list({line["item"]: line for line in lines}.values())
    speeds = [line for line in newest if line["kind"] == "train" and "failed" not in line]
    parts = []
    if speeds:
        header = (
            *("item", "images a GPU", "images/s", "predicted", "utilisation", "peak GiB"),
            *("waits for data", "first step, s", "plain loop", "gap, ms", "code"),
        )
        parts.append(markdown_table(header, map(_row, speeds)))
    facts = [one for line in newest for one in line.get("facts", [])] + from_losses(speeds)
    if facts:
        rows = ((one["fact"], *_held(one).partition(" (")[::2]) for one in facts)
        parts.append(markdown_table(("to be proved", "here", ""), _closed(rows)))
    parts += [f"{one['item']}: {in_words(one)}" for one in newest if one["kind"] == "ceilings"]
    parts += [f"{one['item']}: {in_words(one)}" for one in newest if "failed" in one]
    return "\n\n".join(parts)


def _closed(rows: Iterable[Sequence[str]]) -> Iterable[Sequence[str]]:
    return ((what, held, why.removesuffix(")")) for what, held, why in rows)


def _row(line: Line) -> list[str]:
    expected, share = predicted(line), utilisation(line)
    return [
        line["item"],
        str(line["asked"]["images"]),
        f"{line['images_per_s']:.0f} ({_spread(line['spread'])})",
        _number(expected),
        _number(share, ".1%"),
        f"{line['peak_bytes'] / GIB:.2f}",
        f"{line['data_wait']:.1%}",
        f"{line['first_step']:.1f}",
        _number(line.get("plain_images_per_s")),
        _number(line.get("gap_ms"), ".1f"),
        line["code"],
    ]


def utilisation(line: Line) -> float | None:
    """Return the model-FLOPs utilisation; None for what was not counted."""
    flops = figures.counted(step_of(line["asked"])).get("gflops")
    if flops is None or line["gpu"] is None:
        return None
    done: float = line["images_per_s"] * flops * GIGA / line["world"]
    return done / GPUS[line["gpu"]].bf16


def from_losses(speeds: Sequence[Line]) -> list[Line]:
    """Return what the losses of trainings show: finite, compiled = eager, FSDP2 = DDP."""
    runs: dict[str, dict[str, list[float]]] = {}
    for line in speeds:
        run = f"{step_of(line['asked'])}, {line['asked']['loader']}"
        runs.setdefault(run, {})[line["asked"]["setting"]] = line["losses"]
    if not runs:
        return []
    bad = [
        f"{run}, {setting}"
        for run, settings in runs.items()
        for setting, losses in settings.items()
        if not all(map(math.isfinite, losses))
    ]
    facts = [{"fact": "losses in bf16 are finite", "holds": not bad, "why": ", ".join(bad)}]
    apart = {
        f"{run}, {setting}": _apart(settings["eager"], losses)
        for run, settings in runs.items()
        for setting, losses in settings.items()
        if setting != "eager" and "eager" in settings
    }
    if apart:
        worst = max(apart, key=lambda name: apart[name])
        what = f"the first losses of every setting are the eager step's, to {NEAR:.0%}"
        why = f"at most {apart[worst]:.2%} ({worst}); {len(apart)} pairs"
        facts.append({"fact": what, "holds": apart[worst] <= NEAR, "why": why})
    return facts


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference in the first steps; later ones drift apart."""
    pairs = zip(losses[:_COMPARED], others[:_COMPARED], strict=True)
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)


def kept(lines: Iterable[Line]) -> list[Figure]:
    """Return the figures of the newest good trainings of every card, on one GPU."""
    newest = {(line["card"], line["item"]): line for line in lines if "failed" not in line}
    found = []
    for line in newest.values():
        if line["kind"] != "train" or line["gpu"] is None or line["world"] > 1:
            continue
        asked, real = line["asked"], line["asked"]["loader"] != "synthetic"
        one = Figure(
            step=step_of(asked),
            algorithms=line["algorithms"],
            encoder=asked["size"],
            setting=asked["setting"],
            loop="trainer and loader" if real else "trainer",
            images_per_s=round(line["images_per_s"], 1),
            gib=round(line["peak_bytes"] / GIB, 2),
            first_step=round(line["first_step"], 1),
            spread=[round(rate, 1) for rate in line["spread"]],
            predicted=line["predicted"],
            **{key: line[key] for key in ("gpu", "card", "date", "revision")},
        )
        found.append(one)
        if "plain_images_per_s" in line:
            rate = round(line["plain_images_per_s"], 1)
            plain = replace(one, loop="plain", images_per_s=rate, spread=None, predicted=None)
            found.append(replace(plain, gib=None, first_step=None))
    return found


def add(found: Sequence[Figure]) -> None:
    """Add measurements to the figures; one of the same step on the same day is replaced."""

    def key(line: Line) -> list[Any]:
        return [line[name] for name in ("step", "setting", "loop", "card", "date")]

    new = [{name: one for name, one in asdict(each).items() if one} for each in found]
    replaced = [key(line) for line in new]
    before = [line for line in figures.content()["measured"] if key(line) not in replaced]
    write(figures.content()["counted"], [*before, *new])


def write(counted: Line, measured: Iterable[Line]) -> None:
    """Write the figures: a line for each step, and for each measurement, the oldest first."""
    steps = (f"{json.dumps(key)}: {json.dumps(one)}" for key, one in counted.items())
    lines = map(json.dumps, sorted(measured, key=lambda line: line["date"]))
    parts = ['{"counted": {', ",\n".join(steps), '}, "measured": [', ",\n".join(lines), "]}\n"]
    write_atomic(figures.FILE, "\n".join(parts).encode())
    figures.content.cache_clear()
    figures.efficiency.cache_clear()


def rendered() -> str:
    """Return the README's table: the steps that were counted or measured, predicted or not."""
    done = figures.measured()
    rows = [_figure_row(one) for one in done]
    seen = {(one.step, one.setting) for one in done if one.loop == "trainer"}
    for step, counted in figures.content()["counted"].items():
        for setting, floors in counted["floors"].items():
            if setting != figures.EAGER and (step, setting) not in seen:
                gpu = "h100" if "h100" in floors else next(iter(floors))
                expected = _number(figures.predicted(step, setting, gpu))
                rows.append([*_start(step, setting, "trainer", gpu), expected, *["–"] * 5])
    return markdown_table(_HEADER, rows)


def _start(step: str, setting: str, loop: str, gpu: str) -> list[str]:
    method, size, images = step.split()
    floor = figures.floor(step, setting, gpu)
    title = f"{NAMES.get(method, method)}, {NAMES.get(size, size)}, {images}"
    return [title, setting, loop, gpu.upper(), _number(floor)]


def _number(value: float | None, form: str = ".0f") -> str:
    return "–" if value is None else format(value, form)


def _figure_row(one: Figure) -> list[str]:
    floor = figures.floor(one.step, one.setting, one.gpu)
    return [
        *_start(one.step, one.setting, one.loop, one.gpu),
        _number(one.predicted),
        _number(one.images_per_s),
        _number(None if floor is None else one.images_per_s / floor, ".2f"),
        _number(one.gib, ".2f"),
        _number(one.first_step),
        ", ".join(filter(None, [one.date, one.revision[:8], one.note])),
    ]


def replaced(text: str) -> str:
    """Return the README's text with today's table instead of the one that is there."""
    start = text.index("| " + " | ".join(_HEADER))
    return text[:start] + rendered() + text[text.index("\n\n", start) :]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of the results; with --keep, add them to the figures and the README."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(argv)
    lines = [json.loads(line) for line in options.results.read_text("utf-8").splitlines()]
    for card in dict.fromkeys(line["card"] for line in lines):
        print(f"{card}\n\n{table(line for line in lines if line['card'] == card)}\n")
    if options.keep:
        add(kept(lines))
        README.write_text(replaced(README.read_text("utf-8")), encoding="utf-8")
        print(f"efficiency {figures.efficiency()}; {figures.FILE} and {README} are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
