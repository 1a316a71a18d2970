"""``python -m pospre.evaluate NAME --model MODEL --data PATH [key=value …]``: one evaluation."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pospre.command_line import Parser, add_trust, check_exists, weights_hint
from pospre.errors import UserError, run_command

_EPILOG = """\
examples:
  python -m pospre.evaluate position_grid --model runs/droppos_vits16 --data photos_val
  python -m pospre.evaluate knn --model runs/mae_vits16 --data val.mds bank=train.mds k=20
  python -m pospre.evaluate knn --model timm:vit_small_patch14_dinov2,dinov2_vits14_pretrain.pth \\
      --image-size 224 --data photos_val
  python -m pospre.evaluate position_pictures --model runs/droppos_vits16 --data photos_val \\
      --output pictures.json num_pictures=4

models:
  RUN, CHECKPOINT  a run folder or a checkpoint of pospre (also s3://), with its heads
  FILE             encoder weights (.safetensors, .pth, .pth.tar, .pt, .bin): exports of pospre, or
                   those of MAE, DINO, DINOv2, I-JEPA, BEiT, …. The architecture is read from the
                   tensors.
                   FILE,positions=none if the encoder was trained without positions;
                   FILE,heads=12 and FILE,grid=7x28 say what no tensor shows
  timm:NAME,FILE   weights of the timm model NAME, with timm's normalisation
  timm:NAME        that model with random weights

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
        self.epilog = _EPILOG + describe()
        return super().format_help()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _Parser(
        prog="python -m pospre.evaluate",
        description="Measure a pre-trained encoder: a table on the terminal, and JSON.\n"
        "For a run, the JSON goes to evaluation/NAME.json in its folder, and the report page is\n"
        "written again. For a checkpoint of an earlier step the name is NAME_step40.json.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the evaluation; see below")
    parser.add_argument("--model", required=True, help="model to measure; see below")
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="image folder, .beton file or MDS directory"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--weights",
        default="student",
        choices=("student", "teacher"),
        help="if there is a momentum teacher: measure the trained weights (default) or the "
        "teacher's, which give NAME_teacher.json",
    )
    parser.add_argument(
        "--image-size",
        metavar="N|HxW",
        help="size in pixels of the images for FILE or timm:NAME; positions are resampled. "
        "Default: the size of its positions",
    )
    for key, what in (("mean", "mean"), ("std", "standard deviation")):
        parser.add_argument(
            f"--{key}",
            metavar="X[,Y,Z]",
            help=f"{what} of pixels in [0, 1] in the training of FILE or timm:NAME; "
            "default: that of the export, timm's for NAME, or ImageNet's",
        )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        help="seed of random weights: of timm:NAME, and of the untrained baseline (default: 0)",
    )
    add_trust(parser)
    parser.add_argument("--device", default="auto", help="auto (default), cpu or gpu")
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
    image_size = None if arguments.image_size is None else _size(arguments.image_size)
    mean, std = (_numbers(key, getattr(arguments, key)) for key in ("mean", "std"))
    settings = parse_settings(arguments.settings)
    remedy = "give a run folder, a checkpoint or a file of weights"
    check_exists("--model", arguments.model, remedy + weights_hint(arguments.model))
    check_exists("--data", arguments.data, "give an image folder, a .beton file or MDS shards")
    # late imports, so that mistyped options and paths are fast
    from pospre.evaluation.registry import check_settings

    check_settings(arguments.name, settings)
    from pospre.evaluation.figures import run_folder_of
    from pospre.evaluation.models import Shown, open_model
    from pospre.evaluation.results_table import results_table
    from pospre.evaluation.run import run_evaluation
    from pospre.run.checkpoints.folders import checkpoints_in

    shown = Shown(image_size, mean, std)
    subject = open_model(
        arguments.model, weights=arguments.weights, shown=shown, seed=arguments.seed
    )
    run = None if subject.origin else run_folder_of(arguments.model)
    output = arguments.output
    if output is None and run is not None:
        ending = "" if arguments.weights == "student" else f"_{arguments.weights}"
        newest = checkpoints_in(str(run / "checkpoints"))[:1]
        if any(found.batch != subject.step for found in newest):  # the newest one's is NAME.json
            ending += f"_step{subject.step}"
        output = run / "evaluation" / f"{arguments.name}{ending}.json"
    document = run_evaluation(
        arguments.name,
        data_path=arguments.data,
        settings=settings,
        output=output,
        address=arguments.model,
        weights=arguments.weights,
        device=arguments.device,
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


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 on")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    """Return (height, width) of ``224`` or ``224x160``."""
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if found is None:
        raise UserError(f"--image-size is '{text}'; give a side in pixels, or HxW: 224, 224x160.")
    return int(found[1]), int(found[2] or found[1])


def _numbers(key: str, text: str | None) -> list[float] | None:
    """Return the numbers of ``0.5`` or ``0.48,0.46,0.41``."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    least = 0.0 if key == "mean" else 1e-6
    if not numbers or not all(least <= number <= 1 for number in numbers):
        raise UserError(f"--{key} is '{text}'; give numbers in [0, 1], such as 0.5 or 0.5,0.4,0.4.")
    return numbers


def parse_settings(items: Sequence[str]) -> dict[str, str]:
    """Return the ``key=value`` items as a dict of text.

    Raises:
        UserError: an item is not ``key=value``, or a key is given twice.
    """
    settings: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError(
                f"'{item}' is not a setting; write key=value, without spaces, such as "
                "batch_size=32."
            )
        if not value:
            raise UserError(f"setting '{key}' is empty; write {key}=VALUE, or leave it out.")
        if key in settings:
            raise UserError(f"setting '{key}' is given twice.")
        settings[key] = value
    return settings


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
