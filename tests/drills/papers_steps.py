"""A step of every training in yamls/PAPERS.md, small: on a few pictures, with one block.

Run it as ``python tests/drills/papers_steps.py`` with PYTHONPATH=. ; ten minutes on 2 cores.
"""

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

from pospre import train
from pospre.errors import UserError
from pospre.evaluation.sweep_runs import cells_of
from pospre.recipe.recipe import Recipe, load_recipe
from tests.papers import ROOT, ROWS, words_of, write_data
from tests.torch_fixtures import forget_models

# the rates stay as they are, whatever the batch, so that those of the schedule's ends are below
SMALL = (
    *("data.batch_size=8", "data.num_workers=0", "optimizer.lr_rule=none", "evaluation={}"),
    *("trainer.device=cpu", "trainer.progress_bar=false", "trainer.fsdp=null"),
)
NARROW = {
    "mae": {"decoder_depth": 1},
    "ijepa": {"predictor_depth": 1},
    "dinov2": {"num_prototypes": 256},
}
_EPILOG = """\
Each training keeps its command, views, method and optimiser, and starts from what the command says
it starts from, trained the same way (of published weights: random ones of that layout). Trainings
that differ in their length or name alone are done once.

exit codes: 0 all were trained, 1 one was not.
"""


def main() -> int:
    """Train a step of each, and say which failed."""
    argparse.ArgumentParser(
        description="Train a step of every training in yamls/PAPERS.md.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    commands = list(dict.fromkeys(each for row in ROWS if row.runs for each in trainings(row)))
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pospre-papers-") as temporary:
        os.chdir(temporary)
        with contextlib.redirect_stdout(io.StringIO()):
            write_data(Path(temporary))
        Path("yamls").symlink_to(ROOT / "yamls")
        steps = Steps(commands)
        for number, command in enumerate(commands, start=1):
            start = time.perf_counter()
            try:
                steps.take(command)
            except (Exception, SystemExit) as error:
                failed.append(f"{' '.join(command)}: {type(error).__name__}: {error}")
                print(f"FAILED {failed[-1]}", flush=True)
            else:
                took = time.perf_counter() - start
                print(f"{number}/{len(commands)} {took:.1f} s {' '.join(command)}", flush=True)
        print(f"{len(commands)} trainings, {len(steps.done)} different steps, {len(failed)} failed")
    return 1 if failed else 0


def trainings(row: Any) -> list[tuple[str, ...]]:
    """Return recipe and overrides of a row's trainings, those of a sweep one by one."""
    found = []
    for command in row.spelled():
        words = words_of(command)
        if words.module == "pospre.train":
            found.append(tuple(words.given))
        elif words.module == "pospre.sweep":
            cells = cells_of(str(ROOT / words.given[0]), words.given[1:])
            found += [(words.given[0], *cell.overrides) for cell in cells]
    return found


class Steps:
    """Trains a step of each command, in a run folder of its own."""

    def __init__(self, commands: Sequence[tuple[str, ...]]) -> None:
        recipes = {command: _recipe(command) for command in commands}
        self.by_run = {recipe.run_path(): command for command, recipe in recipes.items()}
        self.starts = {recipe.encoder.weights for recipe in recipes.values()}
        self.done: dict[str, Path] = {}

    def take(self, command: tuple[str, ...]) -> Path:
        """Return the folder of a run like that of ``command``, trained for a step."""
        recipe = _recipe(command)
        small = [*command, *SMALL, *_narrow(recipe)]
        weights = recipe.encoder.weights
        if weights is not None:
            small.append(f"encoder.weights={self._start(weights, recipe)}")
        # a schedule of one step has no room for a warm-up
        if recipe.trainer.max_duration != "1ba":
            small += ["trainer.max_duration=2ba", "schedule.warmup=1ba"]
        planned = load_recipe(small[0], small[1:])
        is_start = str(recipe.run_path()) in self.starts
        key = f"{is_start} {planned.model_copy(update={'run_name': ''})}"
        if key not in self.done:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code = train.main([*small, f"run_name=step{len(self.done)}"])
            forget_models()
            if code:
                raise UserError(said.getvalue())
            self.done[key] = Path("runs") / f"step{len(self.done)}"
            if not is_start:
                shutil.rmtree(self.done[key])  # a checkpoint of 100 MB and more
        return self.done[key]

    def _start(self, weights: str, recipe: Recipe) -> Path:
        if weights.endswith(".pth"):
            return published(weights)
        return self.take(self.by_run[Path(weights)])


def _recipe(command: tuple[str, ...]) -> Recipe:
    return load_recipe(command[0], command[1:])


def _narrow(recipe: Recipe) -> list[str]:
    """Return the overrides that cut a model to a block, and its heads."""
    heads = [
        f"algorithms.{name}.{key}={value}"
        for name, options in NARROW.items()
        if name in recipe.algorithms
        for key, value in options.items()
    ]
    return heads if recipe.encoder.name == "swin_tiny" else ["encoder.depth=1", *heads]


def published(file: str) -> Path:
    """Write random weights of one block where a command names published ones."""
    size = {"s": "small", "b": "base", "l": "large"}[file.partition("_vit")[2][0]]
    registers = "_reg4" if "reg4" in file else ""
    is_dinov2 = file.startswith("dinov2")
    name = f"vit_{size}_patch14{registers}_dinov2" if is_dinov2 else f"vit_{size}_patch16_224"
    tensors = timm.create_model(name, depth=1, num_classes=0).state_dict()
    if registers:  # its table has a row for the class token
        tensors["register_tokens"] = tensors.pop("reg_token")
        table = tensors["pos_embed"]
        tensors["pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    torch.save(tensors, file)
    return Path(file)


if __name__ == "__main__":
    sys.exit(main())
