"""``make evaluation-table``: every evaluation once, at demo size, and with random weights.

Renders scenes, trains the few short runs of ``yamls/demo`` that the evaluations need, and for each
of them an untrained twin: one step at a rate of 1e-12. Then every evaluation measures both by its
command line. An evaluation's figures are one line of ``results/evaluation_table.jsonl``; what is
there with the same command is not done again, and a stopped run resumes from its last checkpoint.
The table also says which independent implementation the tests compare each evaluation with.
"""

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from pospre.errors import run_command
from pospre.evaluation.registry import default_settings, figures_of
from pospre.output import markdown_table
from tests.benchmarks.learn import RESULTS, call
from tests.benchmarks.position_table import append, read_lines, read_results

LINES = RESULTS / "evaluation_table.jsonl"
RECIPES = Path("yamls/demo")
# What each recipe is trained for: one to four minutes of a core, with other work beside it.
EPOCHS = {"droppos": 8, "mae": 2, "mp3": 2, "stop": 2, "intertwined": 1, "supervised": 4}
UNTRAINED = (
    "optimizer.base_lr=1e-12",
    "schedule.start_lr=0",
    "schedule.min_lr=0",
    "schedule.warmup=0ba",
    "trainer.max_duration=1ba",
)
SCENES = {
    "train": ("--num-images", "2000"),
    "val": ("--num-images", "400", "--split", "val"),
    "tracks": ("--num-images", "160", "--frames", "4", "--split", "val"),
}
FROZEN = "bank={train}", "augment=false", "iterations=300", "lr=0.003"
SMALL = "channels=32", "regions=32", "jitter=0.8,1.25", "iterations=400", "batch_size=4", "lr=0.002"


class Row(NamedTuple):
    """What is measured of which run, and what the tests compare the evaluation with."""

    run: str
    check: str
    settings: tuple[str, ...] = ()
    figure: str | None = None  # without it the evaluation's first one
    data: str = "val"


ROWS = {
    "accuracy": Row("supervised", "torchmetrics 1e-6; logits of timm's model 1e-4"),
    "robustness": Row("supervised", "torchmetrics 1e-6, AUPR of scikit-learn 1e-6"),
    "grad_cam": Row("supervised", "finite differences 1e-5"),
    "knn": Row("droppos", "scikit-learn, every answer", ("bank={train}",)),
    "logistic": Row("droppos", "scikit-learn, probabilities 1e-3", ("bank={train}",)),
    "linear": Row(
        "droppos",
        "scikit-learn, probabilities 1e-3; torchmetrics 1e-6; LARS a plain formula 1e-6",
        ("bank={train}", "protocol=vissl", "batch=256"),
    ),
    "position_probe": Row(
        "droppos",
        "scikit-learn: probabilities 1e-3, ridge 1e-4, R² 1e-5",
        ("layers=0,3,6",),
        "content_top1",
    ),
    "position_removal": Row("droppos", "scikit-learn finds R² < 0.01 in what is left"),
    "shifted_positions": Row("droppos", "kNN of scikit-learn 1e-6, torch's grid_sample 1e-5"),
    "position_grid": Row("droppos", "none: predictors of known accuracy, DropPos's counts, exact"),
    "position_pictures": Row(
        "droppos", "none: patches in their places are the image", (), "accuracy"
    ),
    "patch_position": Row("mp3", "none: predictors of known accuracy, exact"),
    "segmentation": Row(
        "droppos", "torchmetrics 1e-6, scikit-learn 1e-12; UperNet: transformers 1e-5", FROZEN
    ),
    "detection": Row(
        "droppos",
        "torchmetrics 1e-6 (it, too, computes by pycocotools)",
        ("bank={train}", *SMALL),
        "AP50",
    ),
    "depth": Row(
        "droppos", "golden numbers 1e-6; depths the renderer's", ("bank={train}",), "rmse"
    ),
    "correspondence": Row(
        "droppos", "perfect features: 1; two published conventions .01", ("num_samples=100",)
    ),
    "video_segmentation": Row(
        "droppos",
        "J scikit-learn 1e-12; F plain numpy 1e-12; propagation plain loop 1e-5",
        ("size=132",),
        data="tracks",
    ),
    "attention": Row("droppos", "NMI scikit-learn, entropy scipy, distance plain loop: 1e-5"),
    "relative_attention": Row("droppos", "plain loop over pairs 1e-6"),
    "position_correlation": Row("droppos", "scipy 1e-6"),
    "drift": Row("droppos", "golden CKA 1e-6, scipy; equal weights exactly", ("num_samples=200",)),
    "duplicates": Row("droppos", "copies that are planted, exactly"),
    "spectrum": Row("droppos", "scipy: spectra 1e-5, ranks 1e-4"),
    "field": Row("intertwined", "scikit-learn and numpy 1e-6"),
    "reconstructions": Row("mae", "none: the training's own pass, 1e-5"),
    "stop_similarity": Row("stop", "scipy 1e-6"),
    "prediction_heatmaps": Row("stop", "plain loop with torch's cosine 1e-4"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make evaluation-table", description=__doc__)
    parser.add_argument("--names", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--work", type=Path, default=Path("data/evaluation"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--table", action="store_true", help="print what was measured, run nothing")
    arguments = parser.parse_args(argv)
    if not arguments.table:
        measure(arguments.names, arguments.work, arguments.runs)
    print(table({line["name"]: line for line in read_lines(LINES)}))
    return 0


def measure(names: list[str], work: Path, runs: Path) -> None:
    """Render, train and measure what is needed by the evaluations that have no line yet."""
    done = {(line["name"], line["command"]) for line in read_lines(LINES)}
    wanted = {}
    for name in names:
        pair = [runs / f"evaluation_{ROWS[name].run}{end}" for end in ("", "_untrained")]
        if (name, " ".join(command(name, pair[0], work))) not in done:
            wanted[name] = pair
    for part in SCENES if wanted else ():
        call("data_prep.scenes", str(work / part), *SCENES[part])
    trained: set[str] = set()
    for name, pair in tqdm(wanted.items(), desc="evaluations", unit="evaluation"):
        recipe = ROWS[name].run
        for run in pair if recipe not in trained else ():
            train(recipe, run, work)
        trained.add(recipe)
        append(LINES, measured(name, pair, work))


def command(name: str, run: Path, work: Path) -> list[str]:
    """Return what ``python -m pospre.evaluate`` is given to measure a run."""
    row = ROWS[name]
    settings = [setting.format(train=work / "train") for setting in row.settings]
    if "baseline" in default_settings(name):
        settings.append("baseline=false")
    start = ["--start", f"{run}_untrained".replace("_untrained" * 2, "_untrained")]
    beside = start if name == "drift" else []
    return [name, "--model", str(run), "--data", str(work / row.data), *beside, *settings]


def train(recipe: str, run: Path, work: Path) -> None:
    """Train a run or its untrained twin; a finished one is left as it is."""
    length = [f"trainer.max_duration={EPOCHS[recipe]}ep", "schedule.warmup=31ba"]
    if run.name.endswith("_untrained"):
        length = list(UNTRAINED)
    place = (
        f"run_name={run.name}",
        f"trainer.run_folder={run.parent}",
        f"data.path={work / 'train'}",
    )
    own = [f"evaluation.accuracy.data={work / 'val'}"] if recipe == "supervised" else []
    call("pospre.train", str(RECIPES / f"{recipe}.yaml"), *place, *length, *own)


def measured(name: str, runs: list[Path], work: Path) -> dict[str, Any]:
    """Run an evaluation of a run and of its untrained twin; return its line."""
    line: dict[str, Any] = {"name": name, "command": " ".join(command(name, runs[0], work))}
    for who, run in zip(("ours", "random"), runs, strict=True):
        started, cpu = time.monotonic(), _processor_seconds()
        call("pospre.evaluate", *command(name, run, work))
        if who == "ours":
            line["seconds"] = round(time.monotonic() - started, 1)
            line["processor"] = round(_processor_seconds() - cpu, 1)
        results = read_results(run / "evaluation" / f"{name}.json")
        line["figure"] = ROWS[name].figure or next(iter(figures_of(name)))
        line[who], line[f"{who}_se"] = figure(results, line["figure"])
    return line


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def figure(results: dict[str, Any], key: str) -> tuple[float, float | None]:
    """Return a figure of an evaluation and its standard error, None where there is none."""
    if key not in results:  # of every picture, not of all
        return statistics.fmean(picture[key] for picture in results["pictures"]), None
    error = results.get("standard_error") if key == "top1" else None
    return results[key], results.get(f"{key}_se", error)


def table(lines: dict[str, dict[str, Any]]) -> str:
    header = "`python -m pospre.evaluate …`", "s", "CPU s", "figure", "random weights", "ours"
    rows = []
    for name, row in ROWS.items():
        cells = [f"`{name}`", "", "", "", "", "not measured"]
        if name in lines:
            line = lines[name]
            values = (_value(line[who], line[f"{who}_se"]) for who in ("random", "ours"))
            times = (f"{line[key]:.0f}" for key in ("seconds", "processor"))
            cells = [f"`{line['command']}`", *times, line["figure"], *values]
        rows.append([*cells, row.check])
    return markdown_table([*header, "checked against"], rows)


def _value(value: float, error: float | None) -> str:
    return f"{value:.3g}" + ("" if error is None else f" ± {error:.1g}")


if __name__ == "__main__":
    sys.exit(run_command(main))
