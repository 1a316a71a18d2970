"""``make learn``: does every method learn? Small ViTs, one run at a time, each resumable.

Converts DATA once, then for every recipe of ``yamls/learn`` and every seed: pre-trains, measures
kNN and logistic accuracy of the encoder and of its untrained twin on held-out images, keeps the
figures in ``tests/benchmarks/results/<method>.json``. What is there already is not done again; a
stopped run resumes from its last checkpoint.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pospre.errors import UserError, run_command
from pospre.output import markdown_table

YAMLS = Path(__file__).parents[2] / "yamls" / "learn"
RESULTS = Path(__file__).parent / "results"
WINDOW = 10  # logged lines that the first and the last figures of training are means of
OWN_MEASURES = ("_accuracy", "_agreement", "_cosine", "_similarity", "_r2")
TEST_NAMES = ("test", "val")
SETTINGS = ("num_bank=10000", "num_samples=5000")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make learn", description=__doc__)
    parser.add_argument("data", type=Path, help="class folders, or train/ and test/ of them")
    methods = sorted(path.stem for path in YAMLS.glob("*.yaml"))
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--work", type=Path, default=Path("data/learn"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--table", action="store_true", help="print what was measured, run nothing")
    arguments = parser.parse_args(argv)
    if not arguments.table:
        train, test = convert(arguments.data, arguments.work)
        wanted = [(method, seed) for seed in arguments.seeds for method in arguments.methods]
        for method, seed in tqdm(wanted, desc="learn", unit="run"):
            if str(seed) not in kept(method):
                keep(method, seed, run(method, seed, train, test, arguments.runs))
    print(table(methods))
    return 0


def convert(data: Path, work: Path) -> tuple[Path, Path]:
    """Convert ``data`` to two MDS data sets below ``work``; finished ones are left as they are."""
    test_name = next((name for name in TEST_NAMES if (data / name).is_dir()), None)
    targets = work / "train", work / "test"
    for target, split in zip(targets, ("train", "val"), strict=True):
        if (data / "train").is_dir() and test_name is not None:
            source, options = data / ("train" if split == "train" else test_name), []
        else:
            source, options = data, ["--split", split]
        call("data_prep.convert", str(source), str(target), "--format", "mds", *options)
    return targets


def run(method: str, seed: int, train: Path, test: Path, runs: Path) -> dict[str, Any]:
    name = f"learn_{method}_seed{seed}"
    folder = runs / name
    options = [f"run_name={name}", f"seed={seed}", f"data.path={train}"]
    call("pospre.train", str(YAMLS / f"{method}.yaml"), *options, f"trainer.run_folder={runs}")
    figures = training_figures(folder / "metrics.jsonl")
    for evaluation in ("knn", "logistic"):
        output = folder / "evaluation" / f"{evaluation}.json"
        if not output.exists():
            call(
                "pospre.evaluate", evaluation, "--model", str(folder), "--data", str(test),
                f"bank={train}", "batch_size=256", *SETTINGS,
            )  # fmt: skip
        results = json.loads(output.read_text())["results"]
        figures[evaluation] = results["top1"]
        figures[f"initial_{evaluation}"] = results["initial_top1"]
    return figures


def training_figures(metrics: Path) -> dict[str, Any]:
    """Return every loss and pretext measure at the beginning and at the end of training."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    window = max(1, min(WINDOW, len(lines) // 4))
    names = [key for key in lines[0] if key.startswith(("loss/", "metric/"))]

    def mean(part: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(line[key] for line in part)

    # not the difference of the clock: a run may have been stopped for hours
    seconds = sum(
        (line["samples"] - before["samples"]) / line["throughput"]
        for before, line in itertools.pairwise(lines)
    )
    return {
        "steps": lines[-1]["step"],
        "minutes": seconds / 60,
        "first": {key: mean(lines[:window], key) for key in names},
        "last": {key: mean(lines[-window:], key) for key in names},
    }


def call(module: str, *arguments: str) -> None:
    """Run one of our commands, as the README writes it."""
    print(f"\n+ python -m {module} {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", module, *arguments])
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise UserError(f"python -m {module} failed; see above. Run it again to resume.")


def kept(method: str) -> dict[str, Any]:
    path = RESULTS / f"{method}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(method: str, seed: int, figures: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    by_seed = dict(sorted({**kept(method), str(seed): figures}.items()))
    (RESULTS / f"{method}.json").write_text(json.dumps(by_seed, indent=2) + "\n")


def table(methods: list[str]) -> str:
    """Return all figures as a Markdown table: mean ± standard deviation over the seeds."""
    header = "method", "loss", "own measure", "kNN %", "logistic %", "seeds", "min"
    rows = []
    for method in methods:
        seeds = list(kept(method).values())
        cells = _cells(seeds) if seeds else ["not measured", "", "", "", "0", ""]
        rows.append([method, *cells])
    return markdown_table(header, rows)


def _cells(seeds: list[dict[str, Any]]) -> list[str]:
    known = [key for key in seeds[0]["first"] if key.endswith(OWN_MEASURES)]
    measure = known[-1] if known else None  # the last one: a position algorithm's before its host's
    cells = [_change(seeds, "loss/total")]
    cells.append("–" if measure is None else f"{measure[7:]} {_change(seeds, measure)}")
    for name in ("knn", "logistic"):
        trained = [100 * figures[name] for figures in seeds]
        initial = statistics.fmean(100 * figures[f"initial_{name}"] for figures in seeds)
        spread = f" ± {statistics.stdev(trained):.1f}" if len(trained) > 1 else ""
        cells.append(f"{statistics.fmean(trained):.1f}{spread} (untrained {initial:.1f})")
    minutes = statistics.fmean(figures["minutes"] for figures in seeds)
    return [*cells, str(len(seeds)), f"{minutes:.1f}"]


def _change(seeds: list[dict[str, Any]], key: str) -> str:
    first = statistics.fmean(figures["first"][key] for figures in seeds)
    last = statistics.fmean(figures["last"][key] for figures in seeds)
    return f"{first:.3g} → {last:.3g}"


if __name__ == "__main__":
    sys.exit(run_command(main))
