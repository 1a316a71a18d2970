"""``python -m pospre.train RECIPE [key=value …]``: pre-train, or resume a run."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pospre.command_line import add_trust, recipe_parser
from pospre.errors import run_command, stoppable
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.trust import trust_classes

_EPILOG = """\
examples:
  python -m pospre.train yamls/demo/droppos.yaml data.path=photos
  python -m pospre.train yamls/pretrain/mae_vitb16.yaml data.path=imagenet.mds run_name=mae_try
  composer -n 8 -m pospre.train yamls/pretrain/droppos_vitb16.yaml trainer.precision=amp_bf16
  python -m pospre.train yamls/finetune/mae_vitb16.yaml --resolve
  python -m pospre.train --options droppos

A recipe can extend another one and state only the differences (extends: other.yaml, one level,
relative to its own file). Sections are merged, other values replaced; null removes a section.

A run writes <trainer.run_folder>/<run_name>/ : recipe.yaml, pretext_tasks.json, metrics.jsonl,
watch.jsonl (warnings), checkpoints/, evaluation/ and report.html. The same command again resumes
from the newest checkpoint. trainer.overwrite=true starts again, a larger trainer.max_duration
trains longer.
Checkpoints also go to S3 with trainer.save_folder=s3://bucket/folder (endpoint: S3_ENDPOINT_URL).
The object run.lease keeps that folder for one run: a second run on any machine is refused. After a
kill, a start on another machine first waits up to 45 s to be sure; on the same machine it does not.

Several nodes: yamls/launch/ has files for SLURM, Kubernetes and ssh.

exit codes: 0 done; 2 a mistake in the recipe, the data or the bucket, or the training diverged,
with one message; 69 a bucket or another node does not answer for minutes; 75 stopped by SIGTERM, or
another rank was killed or is silent; 130 stopped by Ctrl-C. After 75 and 130 the run has saved, and
the same command resumes it.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Pre-train an encoder from a YAML recipe, or resume a run that stopped."
    parser = recipe_parser("pospre.train", description, _EPILOG)
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="train nothing: print the complete recipe, and where each value comes from",
    )
    parser.add_argument(
        "--options",
        action=_Options,
        nargs="?",
        metavar="NAME",
        help="train nothing: print the options of a section, an algorithm or a scheme of "
        "positions; without NAME, list their names",
    )
    add_trust(parser)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.resolve:
        from pospre.training.resolve import describe

        _print(describe(Path(arguments.recipe), arguments.overrides))
        return 0
    with stoppable("outside of the training steps: nothing is lost, the same command resumes"):
        return _run(arguments)


class _Options(argparse.Action):
    """Print the options of a recipe and exit, as ``--help`` does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from pospre.training.options_text import (
            options_text,  # late, so that --help answers at once
        )

        _print(options_text(values))
        parser.exit()


def _print(text: str) -> None:
    """Print for a reader who may stop early, as ``head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    trust_classes(recipe.class_names)
    # late imports, so that --help and mistyped keys are fast
    from pospre.collectives import print_once
    from pospre.evaluation.during_training import online_evaluations
    from pospre.evaluation.recipe_evaluations import check_evaluations
    from pospre.reporting.live_page import LivePage
    from pospre.run.run import Run
    from pospre.scratch import remove_folder_of_torch
    from pospre.training.reference import with_encoders
    from pospre.training.train import train_in

    recipe = with_encoders(recipe)
    check_evaluations(recipe)
    with Run(recipe) as run:
        remove_folder_of_torch()
        callbacks = [*online_evaluations(recipe), LivePage(recipe.run_path())]
        finished_before = train_in(run, callbacks)
        finish(recipe, again=not finished_before)
    print_once(f"run folder: {recipe.run_path()}")
    return 0


def finish(recipe: Recipe, *, again: bool) -> None:
    """Run the recipe's evaluations on the newest checkpoint, and write the report, on rank 0.

    If an evaluation fails, the others and the report are still made.

    Args:
        recipe: of a finished run.
        again: whether to repeat evaluations that already have results.

    Raises:
        UserError: the first evaluation that failed.
    """
    from composer.utils import dist

    from pospre.evaluation.figures import read_documents
    from pospre.evaluation.recipe_evaluations import run_evaluations
    from pospre.evaluation.verdict import judge
    from pospre.object_store import Bucket, is_remote
    from pospre.reporting.page import write_report
    from pospre.run.folder import mirror_run

    if dist.get_global_rank() != 0:
        return
    failures = run_evaluations(recipe, again=again)
    if recipe.verdict is not None:
        start = str(recipe.encoder.weights)
        print(judge(recipe.verdict, start, read_documents(recipe.run_path(), [])).sentence)
    print(f"report: {write_report(recipe.run_path())}")
    if is_remote(recipe.checkpoint_folder()):
        mirror_run(recipe.run_path(), Bucket(recipe.checkpoint_folder(), patience=8, timeout=20))
    if failures:
        raise failures[0]


if __name__ == "__main__":
    sys.exit(run_command(main))
