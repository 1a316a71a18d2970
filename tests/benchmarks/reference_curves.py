"""Reference curves of two demo recipes: how they are made, and that they find mistakes.

``python -m tests.benchmarks.reference_curves [NAME …]`` trains ``yamls/demo/mae.yaml`` and
``droppos.yaml`` for some steps on rendered scenes, with two blocks. Runs with a seed of the
reference, ``tests/benchmarks/reference/<name>.json``, and with another seed must stay in the band.
Runs with ten times the learning rate, or another mask ratio, must leave it. ``--write`` makes the
references first.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from data_prep import scenes
from pospre.errors import run_command
from pospre.output import format_table, write_output
from pospre.recipe.recipe import load_recipe
from pospre.reporting.compare import read_runs
from pospre.reporting.reference_curves import (
    Check,
    check_run,
    make_reference,
    read_reference,
    to_text,
)
from pospre.training.train import train

RECIPES = Path(__file__).parents[2] / "yamls" / "demo"
REFERENCES = Path(__file__).parent / "reference"
SEEDS = (0, 1, 2, 3)
FRESH = 100
STEPS = 25
SCENES = ("--num-images", "256", "--size", "96")
SHORT = (
    f"trainer.max_duration={STEPS}ba",
    "trainer.log_interval=1",
    f"trainer.save_interval={STEPS}ba",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "trainer.progress_bar=false",
    "schedule.warmup=5ba",
    "data.batch_size=16",
    "optimizer.lr_batch=64",  # the rate that the demos have
    "evaluation={}",
)
SHALLOW = "encoder.depth=2"
MASKS = {  # another ratio than the recipe's
    "mae": "algorithms.mae.mask_ratio=0.4",
    "droppos": "algorithms.droppos.position_mask_ratio=0.9",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 where a check is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MASKS)}")
    parser.add_argument("--write", action="store_true", help="make the references first")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="pospre-") as folder:
        work = Path(folder)
        data = render(work)
        for name in tqdm(given.names or [*MASKS], desc="references", unit="recipe"):
            if given.write:
                write(name, data, work)
            rows.append(row(name, data, work))
            tqdm.write("  ".join(rows[-1]))
    header = ["recipe", "windows", "same seed", "other seed", "rate × 10", "other mask"]
    print(format_table("Windows outside the band", header, rows))
    return 1 if any(each[2:4] != ["0", "0"] or "0" in each[4:] for each in rows) else 0


def render(work: Path) -> Path:
    """Render the scenes that all short runs are trained on."""
    scenes.main([str(work / "scenes"), *SCENES])
    return work / "scenes"


def write(name: str, data: Path, work: Path) -> None:
    runs = [short_run(name, data, work, seed) for seed in SEEDS]
    REFERENCES.mkdir(exist_ok=True)
    reference = make_reference(read_runs([str(run) for run in runs]))
    write_output(REFERENCES / f"{name}.json", to_text(reference))


def row(name: str, data: Path, work: Path) -> list[str]:
    """Return how many windows are outside for a fresh seed and for the mistakes."""
    rate = 10 * load_recipe(RECIPES / f"{name}.yaml").optimizer.base_lr
    mistakes = [f"optimizer.base_lr={rate}", MASKS[name]]
    runs = [(SEEDS[0], []), (FRESH, []), *((SEEDS[0], [mistake]) for mistake in mistakes)]
    checks = [beside(name, short_run(name, data, work, seed, *more)) for seed, more in runs]
    outside = [str(sum(not each.is_inside for each in found)) for found in checks]
    return [name, str(len(checks[0])), *outside]


def beside(name: str, run: Path) -> list[Check]:
    """Return a short run beside the reference of its recipe."""
    return check_run(read_runs([str(run)])[0], read_reference(REFERENCES / f"{name}.json"))


def short_run(name: str, data: Path, work: Path, seed: int, *changes: str) -> Path:
    own = [f"data.path={data}", f"seed={seed}", f"run_name={name}_{seed}"]
    overrides = [*SHORT, *own, SHALLOW, f"trainer.run_folder={work}", *changes]
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides)
    shutil.rmtree(recipe.run_path(), ignore_errors=True)  # with a mistake it has the same name
    train(recipe)
    return recipe.run_path()


if __name__ == "__main__":
    sys.exit(run_command(main))
