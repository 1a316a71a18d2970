"""An encoder as a folder for ``torch.hub.load``: it needs timm and safetensors, not pospre."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pospre.atomic_file import write_atomic
from pospre.exporting import timm_file
from pospre.exporting.target import FOLDERS
from pospre.exporting.timm_encoder import Parts

LIBRARY = "timm"
TOLERANCE = timm_file.TOLERANCE
_CODE, _WEIGHTS = FOLDERS["torchhub"]
_HUBCONF = '''\
"""{title}"""

from pathlib import Path

import timm

dependencies = ["torch", "timm", "safetensors"]


def encoder(pretrained=True, **options):
    """timm's {name}.

    Pixels in [0, 1] are normalised with mean {mean} and
    std {std}.

    Args:
        pretrained: load the weights of this folder.
        options: change the arguments of timm.create_model.
    """
    weights = Path(__file__).with_name("{weights}")
    arguments = {{**{kwargs}, **options}}
    path = str(weights) if pretrained else ""
    return timm.create_model("{name}", checkpoint_path=path, **arguments)
'''


def write(parts: Parts, path: Path) -> None:
    """Write ``hubconf.py`` and the weights into a new folder."""
    path.mkdir()
    timm_file.write_safetensors(parts, path / _WEIGHTS)
    text = _HUBCONF.format(
        title=f"The encoder of the run {parts.recipe.run_name}, for torch.hub.load.",
        name=parts.timm_name,
        weights=_WEIGHTS,
        kwargs=repr(parts.kwargs),
        mean=tuple(parts.mean),
        std=tuple(parts.std),
    )
    write_atomic(path / _CODE, text.encode())


def compute(parts: Parts, path: Path, images: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return a sentence about what loads the folder, and its outputs."""
    vit: Any = torch.hub.load(str(path), "encoder", source="local")
    return (
        f"{timm_file.timm_loads(parts)} by torch.hub",
        timm_file.timm_outputs(parts, vit, images),
    )


def usage(parts: Parts, out: Path) -> list[str]:
    """Return the lines of Python that load the folder."""
    return ["import torch", f'model = torch.hub.load({str(out)!r}, "encoder", source="local")']
