"""``python -m pospre.export URI OUT --format FORMAT``: encoder weights for other software."""

import sys

from pospre.command_line import LocalPath, add_trust, check_model, command_parser
from pospre.errors import run_command, to_install
from pospre.exporting.target import FORMATS, check_target, parse_grid

_EPILOG = """\
formats:
  timm         for timm.create_model(NAME, checkpoint_path=OUT), which loads every tensor strictly;
               the exact call is printed. timm's models have a classifier: that of a run with
               "supervised", otherwise one of zeros (--num-classes). OUT ends in .pth or
               .safetensors.
  safetensors  the encoder alone under timm's names, with recipe, architecture and pixel
               normalisation as metadata; of an encoder that timm lacks, for pospre alone. OUT ends
               in .safetensors.
  hf           a folder for transformers' AutoModel.from_pretrained(OUT), which loads every tensor,
               with an image processor. The class is ViTModel, IJepaModel (no class token),
               Dinov2Model (layer scale), Dinov2WithRegistersModel (registers) or DINOv3ViTModel
               (rotary positions of DINOv3). Not for relative or other rotary positions, Swin or
               final_norm=false.
  onnx         a graph of opset 17 for batches of any size, from normalised images to tokens, and to
               logits if a classifier was trained. OUT ends in .onnx.

Before the output gets its name, the software of the format reads it and computes features. They
must equal those of pospre (cosine at least 0.99999), or nothing is written. A card is written
beside a file (OUT.md) or in the folder (README.md): method, data, licence, figures of the run's
evaluations, recipe, and how to load it. onnx and hf need more libraries:
{install}.

examples:
  python -m pospre.export runs/droppos_vits16 droppos_vits16.pth --format timm
  python -m pospre.export runs/mae_vits16 mae.pth --format timm --num-classes 0
  python -m pospre.export s3://bucket/mae/checkpoints mae.safetensors --format safetensors
  python -m pospre.export runs/dinov2_vits16 dinov2_vits16 --format hf --license cc-by-4.0
  python -m pospre.export runs/droppos_vits16 droppos_vits16.onnx --format onnx
  python -m pospre.export dinov2_vits14_pretrain.pth dinov2_vits14.onnx --format onnx --grid 16x16
  python -m pospre.export runs/intertwined_vits16 for_1024.pth --format timm --grid 64x64

exit codes: 0 done; 2 a mistake in the command or the checkpoint, with one message.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Write the encoder of a checkpoint for other software."
    parser = command_parser(
        "pospre.export", description, _EPILOG.format(install=to_install("onnx", "hf"))
    )
    parser.add_argument(
        "checkpoint",
        metavar="URI",
        help="checkpoint or run folder, or published weights: a file or timm:NAME,FILE; also s3://",
    )
    parser.add_argument("out", metavar="OUT", action=LocalPath, help="file, or folder, to write")
    parser.add_argument("--format", required=True, choices=FORMATS, help="see below")
    parser.add_argument(
        "--num-classes",
        type=int,
        help="classes of a zero classifier of --format timm; 0: none. Default: the trained "
        "classifier, or timm's default (mostly 1000)",
    )
    parser.add_argument(
        "--grid",
        metavar="RxC",
        help="rows and columns of patches of the images that the export is for (an onnx graph "
        "takes no others); default: the encoder's. With crop_field, positions are read from the "
        "field, which is better than resampling the file later; RxC of the field writes it as it "
        "is",
    )
    parser.add_argument(
        "--weights",
        default="student",
        choices=("student", "teacher"),
        help="the trained encoder (default), or the momentum teacher that followed it",
    )
    parser.add_argument("--license", metavar="ID", help="license of the weights, for the card")
    add_trust(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    arguments = parser.parse_args(argv)
    check_target(arguments.out, arguments.format, arguments.num_classes, arguments.overwrite)
    if arguments.grid is not None:
        parse_grid(arguments.grid)
    check_model("URI", arguments.checkpoint)
    from pospre.exporting.export import export  # late, so that a mistyped option answers at once

    lines = export(
        arguments.checkpoint,
        arguments.out,
        format=arguments.format,
        num_classes=arguments.num_classes,
        grid=arguments.grid,
        weights=arguments.weights,
        license=arguments.license,
        overwrite=arguments.overwrite,
    )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
