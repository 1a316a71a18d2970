"""``python -m pospre.train RECIPE [key=value …]``: pre-train, or go on where the run stopped."""

import argparse
import sys

from pospre.config import load_recipe
from pospre.errors import run_command

_EPILOG = """\
examples:
  python -m pospre.train yamls/demo/droppos.yaml data.path=photos
  python -m pospre.train yamls/pretrain/mae_vitb16.yaml data.path=imagenet.mds run_name=mae_try
  composer -n 8 -m pospre.train yamls/pretrain/droppos_vitb16.yaml trainer.precision=amp_bf16

A run writes <trainer.run_folder>/<run_name>/ : recipe.yaml, metrics.jsonl, checkpoints/,
evaluation/ and report.html. The same command again goes on from the newest checkpoint;
trainer.overwrite=true starts again. Checkpoints go to S3 with trainer.save_folder=s3://bucket/folder
(endpoint from S3_ENDPOINT_URL).

exit codes: 0 done, 2 a mistake in the recipe, the data or the bucket (said in one message).
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pospre.train",
        description="Pre-train an encoder from a YAML recipe, or go on where the run stopped.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="YAML file; see yamls/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="change a value of the recipe, for instance trainer.max_duration=2ep",
    )
    arguments = parser.parse_args(argv)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    # Late, so that --help and a mistyped key answer at once.
    from pospre.training.run import train

    folder = train(recipe)
    print(f"run folder: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
