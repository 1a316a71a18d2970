"""An encoder as the file that ``timm.create_model(…, checkpoint_path=OUT)`` loads."""

import io
import json
import zipfile
from pathlib import Path

import safetensors.torch
import timm
import torch
from torch import Tensor

from pospre.atomic_file import write_atomic
from pospre.exporting.timm_encoder import Parts, TimmOutputs
from pospre.training.weight_records import RECORD

LIBRARY = "timm"
TOLERANCE = 1e-5


def write(parts: Parts, path: Path) -> None:
    """Write a ``.safetensors`` file, or a plain state dict as ``.pth``; both keep the record."""
    if path.suffix == ".safetensors":
        header = {"format": "pt", **parts.metadata()}  # recipe, architecture and normalisation
        write_atomic(path, safetensors.torch.save(parts.tensors, header))
        return
    buffer = io.BytesIO()
    torch.save(parts.tensors, buffer)
    with zipfile.ZipFile(buffer, "a") as archive:  # torch.load does not look for it
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(zipfile.ZipInfo(f"{root}/{RECORD}"), json.dumps(parts.metadata()))
    write_atomic(path, buffer.getbuffer())


@torch.no_grad()
def compute(parts: Parts, path: Path, images: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return a sentence about what loads the file, and its outputs.

    Another version of timm might build another network with the same names.
    """
    vit = timm.create_model(parts.timm_name, checkpoint_path=str(path), **parts.kwargs)
    names = parts.output_names
    outputs = dict(zip(names, TimmOutputs(vit, names)(images), strict=True))
    return f"timm {timm.__version__} loads all {len(parts.tensors)} tensors", outputs


def usage(parts: Parts, out: Path) -> list[str]:
    """Return the lines of Python that load the file."""
    arguments = [f"checkpoint_path={str(out)!r}"]
    arguments += [f"{key}={value!r}" for key, value in parts.kwargs.items()]
    call = f"timm.create_model({parts.timm_name!r}, {', '.join(arguments)})"
    return ["import timm", f"model = {call}"]
