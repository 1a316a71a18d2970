"""What a machine with GPUs does with every method: one command, one table, and what it proves.

    make gpu-report                                              # hours; resumes where it stopped
    make gpu-report ARGS="--methods mae dinov2 --sizes vits16 --steps 10"
    make gpu-report DATA=/data/in1k.mds ARGS="--output report"   # with the real loader as well

A cell is a recipe of ``yamls/pretrain``, trained for some steps by the recipe's own trainer on all
GPUs. It reads a random batch that stays in memory or, with DATA, images. The settings are DDP and
FSDP2, compiled or not, with a bf16 residual, cuDNN and float8. Each cell runs in a process of its
own, so that only this one fails without memory. Cells that were measured are not measured again:
remove them from the output folder for that. ``--set key=value`` changes every recipe, ``--list``
shows what would be run. ``--count`` needs no GPU: it counts operators and bytes of every method's
eager step, graphs, kernels and bytes of the compiled one, and predicts images/s.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pospre.planning.gpus import GIB, GPUS, Gpu
from tests.benchmarks import gpu_count, gpu_facts
from tests.benchmarks.gpu_count import ROOT, batch_of
from tests.markdown import markdown_table
from tests.processes import started

CELL, TRIALS = "tests.benchmarks.gpu_cell", "tests.benchmarks.gpu_facts"
METHODS = (
    *("mae", "simmim", "ijepa", "dinov2", "supervised"),
    *("droppos", "mp3", "stop", "lut", "intertwined"),
)
SIZES = ("vits16", "vitb16", "vitl16")
_DDP, _FSDP, _FULL = "trainer.fsdp=null", "trainer.fsdp={}", "trainer.residual=fp32"
_HALF = (_DDP, "trainer.compile=true", "trainer.residual=bf16")
SETTINGS = {
    "DDP": [_DDP, "trainer.compile=false", _FULL],
    "DDP, blocks": [_DDP, "trainer.compile=blocks", _FULL],
    "DDP, compiled": [_DDP, "trainer.compile=true", _FULL],
    "DDP, compiled, bf16 residual": [*_HALF],
    "DDP, compiled, bf16 residual, cuDNN": [*_HALF, "trainer.attention=cudnn"],
    "DDP, compiled, bf16 residual, float8": [*_HALF, "trainer.float8=true"],
    "FSDP2": [_FSDP, "trainer.compile=false", _FULL],
    "FSDP2, compiled": [_FSDP, "trainer.compile=blocks", _FULL],
}
_GUESS = 90.0  # seconds of a cell, before one was measured


@dataclass(frozen=True)
class Cell:
    """What one process measures."""

    method: str
    size: str
    setting: str
    real: bool
    device_batch: int
    warm_up: int
    recipe: str
    overrides: list[str]

    @property
    def name(self) -> str:
        loader = "images" if self.real else "synthetic"
        return f"{self.method}-{self.size}-{self.setting.replace(', ', '-')}-{loader}"


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield what is to be measured, the first of every method before the others."""
    for setting in options.settings:
        for size in options.sizes:
            for method in options.methods:
                for real in [False, True] if options.data else [False]:
                    yield _cell(options, method, size, setting, real=real)


def _cell(options: argparse.Namespace, method: str, size: str, setting: str, *, real: bool) -> Cell:
    warm_up = max(2, options.steps // 4)
    overrides = [
        f"encoder.name={size}",
        "trainer.precision=amp_bf16",
        "trainer.progress_bar=false",
        f"trainer.device={options.device}",
        f"trainer.max_duration={options.steps + warm_up}ba",
        "schedule.warmup=1ba",
        "schedule.length=null",
        "evaluation={}",
        *([f"data.path={options.data}"] if real else []),
        *(["algorithms.supervised.num_classes=1000"] if method == "supervised" else []),
        *SETTINGS[setting],
        *options.set,
    ]
    batch = options.batch or batch_of(method, size)
    recipe = str(ROOT / f"yamls/pretrain/{method}_vitb16.yaml")
    return Cell(method, size, setting, real, batch, warm_up, recipe, overrides)


def measured(cell: Cell, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return a cell's outcome: from its file, or from a process that is started now."""
    path = folder / f"{cell.name}.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found["cell"] == asdict(cell):
            return found
    asked = folder / f"{cell.name}.cell"
    asked.write_text(json.dumps(asdict(cell)))
    begun = time.monotonic()
    ranks = options.ranks or max(1, torch.cuda.device_count())
    outcome = _run(CELL, asked, ranks, options.limit)
    result = {"cell": asdict(cell), **outcome, "seconds": time.monotonic() - begun}
    path.write_text(json.dumps(result, indent=1))
    return result


def _run(module: str, asked: Path, ranks: int, limit: float) -> Any:
    """Run a module on a file that says what is asked; return what it wrote beside that."""
    written = asked.with_suffix(".out")
    written.unlink(missing_ok=True)
    launcher = ["-m", "composer.cli.launcher", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", module, str(asked)]
    with started(command, cwd=ROOT) as process:  # what it has started ends with it
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {limit:g} s"}
    if written.exists():
        return json.loads(written.read_text())
    said = [line for line in (output + errors).splitlines() if line.strip()]
    asked.with_suffix(".log").write_text("\n".join(said))
    short = any("OutOfMemoryError" in line for line in said)
    return {"failed": "out of memory" if short else said[-1][:200] if said else "nothing was said"}


def tried(todo: Sequence[Cell], folder: Path, limit: float) -> list[gpu_facts.Fact]:
    """Return what small trials of every method show, on one GPU."""
    firsts = {cell.method: cell for cell in reversed(todo) if not cell.real}.values()
    asked = folder / "facts.asked"
    small = ["data.batch_size=4", "optimizer.lr_rule=none"]  # no peak below the schedule's start
    text = json.dumps([(cell.recipe, [*cell.overrides, *small]) for cell in firsts])
    written = asked.with_suffix(".out")
    if written.exists() and asked.read_text() == text:
        outcome = json.loads(written.read_text())
    else:
        asked.write_text(text)
        outcome = _run(TRIALS, asked, 1, limit)
    if isinstance(outcome, list):
        return outcome
    return [gpu_facts.fact("trials", False, outcome["failed"])]


def table(results: Sequence[dict[str, Any]]) -> str:
    header = [
        *("method", "size", "setting", "loader", "batch a GPU", "images/s"),
        *("model-FLOPs utilisation", "peak GiB a GPU", "waits for data", "first step, s"),
    ]
    rows = []
    for result in results:
        cell = result["cell"]
        start = [cell["method"], cell["size"], cell["setting"]]
        start += ["images" if cell["real"] else "synthetic", str(cell["device_batch"])]
        cells = [result["failed"], *[""] * 4] if "failed" in result else _figures(result)
        rows.append([*start, *cells])
    return markdown_table(header, rows)


def _figures(result: dict[str, Any]) -> list[str]:
    share = utilisation(result)
    return [
        f"{result['images_per_s']:.1f}",
        "–" if share is None else f"{100 * share:.1f} %",
        f"{result['peak_bytes'] / GIB:.2f}",
        f"{100 * result['data_wait']:.1f} %",
        f"{result['first_step']:.1f}",
    ]


def utilisation(result: dict[str, Any]) -> float | None:
    """Return the model-FLOPs utilisation; None on what the table of GPUs lacks."""
    gpu = gpu_of(result["device"], result["device_bytes"])
    if gpu is None:
        return None
    done: float = result["images_per_s"] * result["flops_per_image"] / result["world"]
    return done / gpu.bf16


def gpu_of(name: str, memory: float) -> Gpu | None:
    """Return what is known of a GPU by the name that its driver gives."""
    words = name.upper().replace(" ", "")
    known = [gpu for key, gpu in GPUS.items() if key.partition("-")[0].upper() in words]
    return min(known, key=lambda gpu: abs(gpu.memory - memory), default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write the table and what is proved."""
    options = _parse(argv)
    if options.count:
        gpu_count.print_table(options.methods, options.sizes, options.batch, options.set)
        return 0
    todo = list(cells(options))
    if options.list:
        print("\n".join(cell.name for cell in todo))
        return 0
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for number, cell in enumerate(todo):
        spent = [result["seconds"] for result in results]
        each = sum(spent) / len(spent) if spent else _GUESS
        left = each * (len(todo) - number) / 60
        print(f"[{number + 1}/{len(todo)}] {cell.name}; {left:.0f} min left", flush=True)
        results.append(measured(cell, folder, options))
        print(f"    {results[-1].get('failed') or ' '.join(_figures(results[-1]))}", flush=True)
        _write(folder, results, gpu_facts.from_cells(results))
    print("trials of what the cells do not show", flush=True)
    facts = [*gpu_facts.from_cells(results), *tried(todo, folder, options.limit)]
    _write(folder, results, facts)
    print(gpu_facts.table(facts))
    return 0


def _write(folder: Path, results: list[dict[str, Any]], facts: list[gpu_facts.Fact]) -> None:
    (folder / "report.json").write_text(json.dumps({"cells": results, "facts": facts}, indent=1))
    devices = sorted({f"{one['world']} × {one['device']}" for one in results if "device" in one})
    text = f"{', '.join(devices) or 'nothing measured'}\n\n{table(results)}\n\n"
    (folder / "report.md").write_text(text + gpu_facts.table(facts) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES])
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS], choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a cell")
    parser.add_argument("--batch", type=int, help="images on each GPU, instead of those by size")
    parser.add_argument("--data", help="images, for cells with the real loader")
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--ranks", type=int, help="processes, instead of one for each GPU")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a cell")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--count", action="store_true", help="count a step, without a GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/gpu_report")
    parser.add_argument("--list", action="store_true", help="only show what would be run")
    options = parser.parse_args(argv)
    needs_gpu = options.device == "gpu" and not options.list and not options.count
    if needs_gpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --batch 2 --steps 2 tries the command out")
    return options


if __name__ == "__main__":
    sys.exit(main())
