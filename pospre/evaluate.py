"""``python -m pospre.evaluate NAME --model MODEL --data PATH [key=value …]``: one evaluation."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pospre.command_line import LocalPath, Parser, command_parser
from pospre.errors import UserError, run_command
from pospre.model_arguments import (
    MODELS,
    add_model_options,
    check_model_and_data,
    parse_settings,
    shown_options,
)

if TYPE_CHECKING:
    from pospre.recipe.monitoring import Verdict

_EPILOG = """\
examples:
  python -m pospre.evaluate position_grid --model runs/droppos_vits16 --data photos_val
  python -m pospre.evaluate knn --model runs/mae_vits16 --data val.mds bank=train.mds k=20
  python -m pospre.evaluate knn --model timm:vit_small_patch14_dinov2,dinov2_vits14_pretrain.pth \\
      --image-size 224 --data photos_val
  python -m pospre.evaluate position_pictures --model runs/droppos_vits16 --data photos_val \\
      --output pictures.json num_pictures=4

{models}
exit codes: 0 done; 2 a mistake in the command, the model or the data, with one message; 69 a bucket
does not answer.

evaluations (python -m pospre.evaluate NAME --help describes one and its settings):
"""


class _Parser(Parser):
    """Lists the evaluations in its help, or describes the one that is named."""

    named: str | None = None

    def format_help(self) -> str:
        from pospre.evaluation.registry import describe, describe_one

        if self.named is not None:
            return f"{self.format_usage()}\n{self.named}: {describe_one(self.named)}\n"
        self.epilog = _EPILOG.format(models=MODELS) + describe()
        return super().format_help()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = (
        "Measure a pre-trained encoder: a table on the terminal, and JSON.\n"
        "For a run, the JSON goes to evaluation/NAME.json in its folder, and the report page is\n"
        "written again. For a checkpoint of an earlier step the name is NAME_step40.json,\n"
        "with --weights teacher NAME_teacher.json. What a run's verdict follows from stays: other\n"
        "results of its evaluations go to NAME_apart.json."
    )
    parser = command_parser("pospre.evaluate", description, kind=_Parser)
    parser.add_argument("name", metavar="NAME", help="the evaluation; see below")
    parser.add_argument("--output", action=LocalPath, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--start",
        metavar="MODEL",
        help="encoder to measure beside it, such as the weights that its training started from",
    )
    add_model_options(parser)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings of the evaluation; see below"
    )
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        from pospre.evaluation.registry import evaluation_names

        names = evaluation_names()
        parser.named = next((word for word in words if word in names), None)
    return _evaluate(parser.parse_intermixed_args(argv))


def _evaluate(arguments: argparse.Namespace) -> int:
    shown, settings = shown_options(arguments), parse_settings(arguments.settings)
    check_model_and_data(arguments)
    # late imports, so that mistyped options and paths are fast
    from pospre.evaluation.registry import check_settings, opens_start

    check_settings(arguments.name, settings)
    if arguments.start is not None and not opens_start(arguments.name):
        raise UserError(
            f"--start = {arguments.start}, but {arguments.name} measures one model alone. Leave it "
            f"out; for its figures, give --model {arguments.start}"
        )
    from pospre.evaluation.figures import run_folder_of
    from pospre.evaluation.models import open_beside, open_model
    from pospre.evaluation.results_table import results_table
    from pospre.evaluation.run import run_evaluation
    from pospre.run.checkpoints.folders import checkpoints_in
    from pospre.training.foreign import Shown

    subject = open_model(
        arguments.model, weights=arguments.weights, shown=Shown(*shown), seed=arguments.seed
    )
    run = None if subject.origin else run_folder_of(arguments.model)
    output = arguments.output
    if output is None and run is not None:
        ending = "" if arguments.weights == "student" else f"_{arguments.weights}"
        newest = checkpoints_in(str(run / "checkpoints"))[:1]
        if any(each.batch != subject.step for each in newest):  # the newest one's is NAME.json
            ending += f"_step{subject.step}"
        elif not ending and _keeps(arguments, subject.recipe.verdict, settings.get("half")):
            ending = "_apart"
        output = run / "evaluation" / f"{arguments.name}{ending}.json"
    document = run_evaluation(
        arguments.name,
        data_path=arguments.data,
        settings=settings,
        output=output,
        address=arguments.model,
        weights=arguments.weights,
        device=arguments.device,
        start=arguments.start and open_beside(arguments.start, subject.recipe),
        **subject._asdict(),
    )
    print(results_table(arguments.name, document["results"]))
    if output is None:
        print("(not in a run folder: nothing written; --output FILE.json keeps the numbers)")
        return 0
    print(f"written: {output}")
    if run is not None and output.absolute().is_relative_to(run.absolute()):
        _refresh_report(run)
    return 0


def _keeps(arguments: argparse.Namespace, verdict: "Verdict | None", half: str | None) -> bool:
    """Return whether NAME.json has what a run's verdict follows from, and these are others."""
    from pospre.evaluation.verdict import figures_to_judge

    if verdict is None:
        return False
    declared = {figure.partition("/")[0] for figure in figures_to_judge(verdict)}
    same = half == "judge" and arguments.weights == verdict.weights and arguments.start
    return arguments.name in declared and not same


def _refresh_report(run: Path) -> None:
    from pospre.reporting.page import write_report

    if not (run / "metrics.jsonl").is_file():
        return
    try:
        print(f"report: {write_report(run)}")
    except UserError as error:
        # the results are saved; the page can be written again later
        print(f"the report was not updated: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command(main))
