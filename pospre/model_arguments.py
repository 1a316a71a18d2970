"""Options of commands that read a model and a data set."""

import argparse
import re
from collections.abc import Sequence

from pospre.command_line import add_trust, check_exists, check_model
from pospre.errors import UserError

MODELS = """\
models:
  RUN, CHECKPOINT  a run folder or a checkpoint of pospre (also s3://), with its heads
  FILE             encoder weights (.safetensors, .pth, .pth.tar, .pt, .bin): exports of pospre, or
                   those of MAE, DINO, DINOv2, I-JEPA, BEiT, …. The architecture is read from the
                   tensors.
                   FILE,positions=none if the encoder was trained without positions;
                   FILE,heads=12 and FILE,grid=7x28 say what no tensor shows
  timm:NAME,FILE   weights of the timm model NAME, with timm's normalisation
  timm:NAME        that model with random weights
"""
"""What ``--model`` takes, for ``--help``."""

Shown = tuple[tuple[int, int] | None, list[float] | None, list[float] | None]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, the data set, how the model is read and shown images, and the device."""
    parser.add_argument("--model", required=True, help="model to read; see below")
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="image folder, .beton file or MDS directory"
    )
    parser.add_argument(
        "--weights",
        default="student",
        choices=("student", "teacher"),
        help="if there is a momentum teacher: read the trained weights (default) or the teacher's",
    )
    parser.add_argument(
        "--image-size",
        metavar="N|HxW",
        help="size in pixels of the images for FILE or timm:NAME; positions are resampled. "
        "Default: the size of its positions, or 224 if they are a table of a larger square",
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
        help="seed of random weights: of timm:NAME, and of an untrained baseline (default: 0)",
    )
    add_trust(parser)
    parser.add_argument("--device", default="auto", help="auto (default), cpu or gpu")


def check_model_and_data(arguments: argparse.Namespace) -> None:
    """Check that model and data exist, before imports that take seconds."""
    check_model("--model", arguments.model)
    check_exists("--data", arguments.data, "give an image folder, a .beton file or MDS shards")


def shown_options(arguments: argparse.Namespace) -> Shown:
    """Return image size, mean and deviation, each None if not given."""
    size = None if arguments.image_size is None else _size(arguments.image_size)
    return size, _numbers("mean", arguments.mean), _numbers("std", arguments.std)


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 on")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    """Return (height, width) of ``224`` or ``224x160``."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if match is None:
        raise UserError(f"--image-size is '{text}'; give a side in pixels, or HxW: 224, 224x160.")
    return int(match[1]), int(match[2] or match[1])


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
