"""What is to be proved on GPUs: from the cells of ``gpu_report.py``, and by small trials.

    python -m tests.benchmarks.gpu_facts ASKED      # JSON: [[recipe, [key=value, …]], …]

tries out what cells do not show, in a process of its own.
"""

import json
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pospre.planning.gpus import GIB
from pospre.recipe.recipe import load_recipe
from tests.benchmarks.gpu_cell import measure, synthetic
from tests.markdown import markdown_table

Fact = dict[str, Any]
Losses = dict[str, dict[str, list[float]]]
"""By run and setting."""
NEAR = 0.02  # of a loss in bf16, where a single product is off by 0.4 %
_OVERLAP = 0.8  # of the time that copying and computing take one after the other
_TOO_MANY = 4096  # images for any GPU of today at once
_NO_GPU = "needs a GPU"
_COMPILED = [
    *(("DDP", f"DDP, {kind}") for kind in ("blocks", "compiled", "compiled, bf16 residual")),
    ("FSDP2", "FSDP2, compiled"),
]


def from_cells(results: Sequence[dict[str, Any]]) -> list[Fact]:
    """Return what the losses of the cells show."""
    losses: Losses = {}
    worlds = set()
    for result in results:
        if "losses" in result:
            cell = result["cell"]
            run = f"{cell['method']} {cell['size']}{' on images' if cell['real'] else ''}"
            losses.setdefault(run, {})[cell["setting"]] = result["losses"]
            worlds.add(result["world"])
    bad = [
        f"{run}, {setting}"
        for run, settings in losses.items()
        for setting, values in settings.items()
        if not all(map(math.isfinite, values))
    ]
    sharded = fact("FSDP2 = DDP", None, "needs two GPUs")
    if max(worlds, default=1) > 1:
        sharded = _same(losses, [("DDP", "FSDP2")], "FSDP2 = DDP")
    finite = fact("losses in bf16 are finite", not bad if losses else None, ", ".join(bad))
    return [finite, _same(losses, _COMPILED, "compiled = eager"), sharded]


def fact(what: str, holds: bool | None, why: str) -> Fact:
    """Return whether something holds; None: that could not be seen here."""
    return {"fact": what, "holds": holds, "why": why}


def _same(losses: Losses, pairs: list[tuple[str, str]], what: str) -> Fact:
    """Return whether two settings of every run have the same losses, and where they differ most."""
    apart = {
        f"{run}, {second}": max(
            abs(a - b) / max(abs(a), 1e-6)
            for a, b in zip(settings[first], settings[second], strict=True)
        )
        for run, settings in losses.items()
        for first, second in pairs
        if first in settings and second in settings
    }
    if not apart:
        return fact(what, None, "no two cells of one run")
    worst = max(apart, key=lambda name: apart[name])
    why = f"at most {apart[worst]:.2%} ({worst}); {len(apart)} pairs"
    return fact(f"{what}, losses to {NEAR:.0%}", apart[worst] <= NEAR, why)


def table(found: Sequence[Fact]) -> str:
    words = {True: "pass", False: "FAIL", None: "not seen"}
    rows = [(one["fact"], words[one["holds"]], one["why"]) for one in found]
    return markdown_table(["to be proved", "here", ""], rows)


def step_without_sync(recipe: Path, overrides: Sequence[str]) -> Fact:
    """Try whether a step, from the masks to the teacher, never waits for the GPU."""
    run = synthetic(load_recipe(recipe, overrides))
    device = torch.device("cuda" if run.device.name == "gpu" else "cpu")
    model = run.model.to(device).train()
    batch = {key: value.to(device) for key, value in next(iter(run.loader)).items()}
    what = f"no host sync in a step of {', '.join(run.recipe.algorithms)}"
    for group in run.optimizer.param_groups:  # the schedule's is 0 at first
        group["lr"] = 1e-4

    def step() -> None:
        run.optimizer.zero_grad()
        written = model.prepare(dict(batch), 0.5)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(model(written), written)["total"]
        loss.backward()
        run.optimizer.step()
        model.after_step(0.5)

    step()
    on_gpu = device.type == "cuda"
    try:
        if on_gpu:  # raise where the GPU is waited for
            torch.cuda.set_sync_debug_mode("error")
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)[:-5:-1]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        return fact(what, False, f"{str(error).splitlines()[0]}: {where}")
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return fact(what, True, "") if on_gpu else fact(what, None, _NO_GPU)


def auto_microbatch(recipe: Path, overrides: Sequence[str]) -> Fact:
    """Try whether ``trainer.microbatch_size: auto`` finds what fits, and the training does fit."""
    what = "trainer.microbatch_size: auto finds what fits of too large a batch, and trains"
    on_gpu = torch.cuda.is_available()
    size = _TOO_MANY if on_gpu else 4
    with tempfile.TemporaryDirectory(prefix="pospre-auto-") as folder:
        more = ["trainer.microbatch_size=auto", "trainer.max_duration=3ba", "trainer.fsdp=null"]
        more += [f"data.batch_size={size}", f"trainer.run_folder={folder}", "trainer.compile=false"]
        try:
            found = measure(load_recipe(recipe, [*overrides, *more]), real=False, warm_up=1)
        except torch.OutOfMemoryError as error:
            return fact(what, False, str(error).splitlines()[0])
    if found["microbatch"] == size:
        return fact(what, None, f"all {size} fit")
    why = f"{found['microbatch']} of {size} at a time, {found['peak_bytes'] / GIB:.1f} GiB"
    return fact(what, True, why)


def copies_overlap() -> Fact:
    """Try whether images in pinned memory are copied while the GPU computes."""
    what = f"copies from pinned memory take place beside computing, in ≤ {_OVERLAP:.0%} of the time"
    if not torch.cuda.is_available():
        return fact(what, None, _NO_GPU)
    images = torch.empty(256, 3, 224, 224, dtype=torch.uint8).pin_memory()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def copy() -> None:
        with torch.cuda.stream(side):
            for _ in range(20):
                images.to("cuda", non_blocking=True)

    def compute() -> None:
        for _ in range(20):
            matrix @ matrix

    share = _seconds(copy, compute) / (_seconds(copy) + _seconds(compute))
    return fact(what, share <= _OVERLAP, f"{share:.0%}")


def _seconds(*work: Callable[[], None]) -> float:
    """Return how long the GPU takes, of three times the shortest."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for part in work:
            part()
        torch.cuda.synchronize()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[1:])


def main(asked: Path) -> int:
    """Try out the recipes in a file, and write what came of it beside it."""
    found = [copies_overlap()]
    asked_for = json.loads(asked.read_text())
    for recipe, overrides in asked_for:
        found.append(step_without_sync(recipe, overrides))
    if asked_for:
        found.append(auto_microbatch(*asked_for[0]))
    asked.with_suffix(".out").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
