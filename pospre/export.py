"""``python -m pospre.export URI OUT --format FORMAT``: encoder weights for other software."""

import sys
from pathlib import Path

from pospre.command_line import check_exists, command_parser
from pospre.errors import run_command, to_install
from pospre.exporting.target import FORMATS, check_target, parse_grid

_EPILOG = """\
formats:
  timm         what timm.create_model(NAME, checkpoint_path=OUT) loads, every tensor, strictly; the
               exact call is printed. timm's models have a classifier: that of a run with
               "supervised" goes along, else a zero one (--num-classes). OUT ends in .pth, or in
               .safetensors.
  safetensors  the bare encoder under timm's names, with recipe, architecture and pixel
               normalisation as metadata. OUT ends in .safetensors.
  hf           a folder that transformers' AutoModel.from_pretrained(OUT) loads, every tensor, with
               an image processor: ViTModel, or what is the same without a class token
               (IJepaModel), with layer scale (Dinov2Model), registers
               (Dinov2WithRegistersModel) or rotary positions as DINOv3 has them
               (DINOv3ViTModel). Not for relative or other rotary positions, Swin or
               final_norm=false.
  onnx         a graph of opset 17 for batches of any size, from normalised images to tokens, and to
               logits where a classifier was trained. OUT ends in .onnx.
  torchhub     a folder that torch.hub.load(OUT, "encoder", source="local") loads, here or from a
               repository; it needs timm and safetensors, and not pospre.

The software that a format is for reads what was written and computes features, before it shows
under its name: they are ours (cosine at least 0.99999), or nothing is written. Beside every file
(OUT.md), or in the folder (README.md), stands its card: method, data, licence, figures of the run's
evaluations, recipe, and how to load it. onnx and hf need libraries of their own:
{install}.

examples:
  python -m pospre.export runs/droppos_vits16 droppos_vits16.pth --format timm
  python -m pospre.export runs/mae_vits16 mae.pth --format timm --num-classes 0
  python -m pospre.export s3://bucket/mae/checkpoints mae.safetensors --format safetensors
  python -m pospre.export runs/dinov2_vits16 dinov2_vits16 --format hf --license cc-by-4.0
  python -m pospre.export runs/droppos_vits16 droppos_vits16.onnx --format onnx
  python -m pospre.export dinov2_vits14_pretrain.pth dinov2_vits14.onnx --format onnx --grid 16x16
  python -m pospre.export runs/intertwined_vits16 for_1024.pth --format timm --grid 64x64

exit codes: 0 done, 2 a mistake in the command or the checkpoint (said in one message).
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
        help="checkpoint file or run folder; or weights of others: a file, or timm:NAME,FILE; also "
        "s3://",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="file, or folder, to write")
    parser.add_argument("--format", required=True, choices=FORMATS, help="see below")
    parser.add_argument(
        "--num-classes",
        type=int,
        help="classes of a zero classifier of --format timm; 0: none. Default: the trained "
        "classifier, or what timm's create_model makes without being told (mostly 1000)",
    )
    parser.add_argument(
        "--grid",
        metavar="RxC",
        help="rows and columns of patches of the images that are written for (an onnx graph takes "
        "no others); default: the encoder's. Positions of a field (crop_field) are read from it at "
        "once, which keeps more than resampling the file would; RxC of the field itself writes it "
        "as it is",
    )
    parser.add_argument(
        "--weights",
        default="student",
        choices=("student", "teacher"),
        help="the trained encoder (default), or the momentum teacher that followed it",
    )
    parser.add_argument("--license", metavar="ID", help="of the weights, for the card: cc-by-4.0")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    arguments = parser.parse_args(argv)
    check_target(arguments.out, arguments.format, arguments.num_classes, arguments.overwrite)
    if arguments.grid is not None:
        parse_grid(arguments.grid)
    remedy = "give a run folder, a checkpoint or a file of weights"
    check_exists("URI", arguments.checkpoint, remedy)
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
