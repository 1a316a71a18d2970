"""An encoder with positions that timm lacks, as the file that ``pospre.load_weights`` loads."""

from pathlib import Path

import torch
from torch import Tensor

from pospre.evaluation.models import open_model
from pospre.exporting import timm_file
from pospre.exporting.timm_encoder import Parts
from pospre.nn.encoder_options import EncoderOptions

LIBRARY = "pospre"
TOLERANCE = timm_file.TOLERANCE
write = timm_file.write


@torch.no_grad()
def compute(parts: Parts, path: Path, images: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return a sentence about what loads the file, and its outputs."""
    encoder = open_model(str(path)).model.encoder
    return f"pospre loads all {len(parts.tensors)} tensors", {"tokens": encoder(images)}


def usage(parts: Parts, out: Path) -> list[str]:
    """Return the lines of Python that load the file."""
    given = parts.recipe.encoder.arguments() | {"image_size": parts.image_size}
    name, home = given.pop("name"), parts.model.encoder.positions.name.partition(":")
    usual = vars(EncoderOptions)
    arguments = [repr(name)]
    arguments += [f"{key}={value!r}" for key, value in given.items() if value != usual[key]]
    return [
        *([f"import {home[0]}"] if home[1] else []),
        "import pospre",
        f"model = pospre.PretrainModel(pospre.build_encoder({', '.join(arguments)}))",
        f"pospre.load_weights(model, {str(out)!r})",
    ]
