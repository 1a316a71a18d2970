"""``python -m pospre.embed --model MODEL --data PATH OUT [key=value …]``: features of images."""

import sys

from pospre.command_line import Parser, command_parser
from pospre.errors import run_command
from pospre.model_arguments import (
    MODELS,
    add_model_options,
    check_model_and_data,
    parse_settings,
    shown_options,
)

_EPILOG = """\
examples:
  python -m pospre.embed --model runs/mae_vits16 --data photos features
  python -m pospre.embed --model dinov2_vits14_pretrain.pth --image-size 224 --data photos \\
      features features=cls,patches dtype=float16
  python -m pospre.embed --model runs/droppos_vits16 --data val.mds features layers=6,9,12
  composer -n 8 -m pospre.embed --model runs/mae_vitb16 --data s3://bucket/photos features

OUT is a folder:
  cls.npy          float32 (n, D), one row per image, in the order of the data set;
                   numpy.load("OUT/cls.npy", mmap_mode="r") opens it. So do mean.npy and patches.npy
                   (n, N, D). With layers=6,12 there are cls_l6.npy, cls_l12.npy, …
  images.jsonl     a line per row: row, index, path, label, height and width of the upright image,
                   box (x0, y0, x1, y1 of the view, in its pixels) and SHA-256 of its bytes
  embedding.json   model and its SHA-256, data, layers, norm, image size, resize rule, mean, std,
                   grid, places of the patches (row and column of their centres, as shares of the
                   view), versions

The size is printed first; without 1.1 times as much free space, nothing is written. Until all rows
are there, the folder is called OUT.partial. Run the same command again after a stop or a kill: it
continues, and the files become the same, byte for byte. Several ranks each write their own rows, on
a disk that all can reach, and give the same bytes as one. --image-size is also for a run, if its
positions take other sizes.

{models}
exit codes: 0 done; 2 a mistake in the command, the model or the data, with one message, or images
that cannot be read (their rows are NaN; skip=true accepts them); 69 a bucket does not answer; 75,
130 stopped: run it again.

{settings}
"""


class _Parser(Parser):
    """Adds the settings to the help."""

    def format_help(self) -> str:
        from pospre.embedding.settings import Embed
        from pospre.evaluation.registry import describe_settings

        self.epilog = _EPILOG.format(models=MODELS, settings=describe_settings(Embed))
        return super().format_help()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Write the features of every image: class tokens, means, patches."
    parser = command_parser("pospre.embed", description, kind=_Parser)
    parser.add_argument("out", metavar="OUT", help="folder to write; see below")
    add_model_options(parser)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="what to write; see below")
    arguments = parser.parse_intermixed_args(argv)
    shown, settings = shown_options(arguments), parse_settings(arguments.settings)
    check_model_and_data(arguments)
    # late imports, so that mistyped options and paths are fast
    from pospre.embedding.settings import Embed
    from pospre.evaluation.registry import typed_settings

    chosen = typed_settings(Embed, "embed", settings)
    from pospre.embedding.embed import embed
    from pospre.embedding.features import Ranks
    from pospre.training.foreign import Shown

    embed(
        arguments.model,
        arguments.data,
        arguments.out,
        chosen,
        weights=arguments.weights,
        shown=Shown(*shown),
        seed=arguments.seed,
        device=arguments.device,
        ranks=Ranks.of_launcher(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
