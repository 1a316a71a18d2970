"""Weights, images and name maps that the recorded numbers of the official codes belong to.

The fixtures hold numbers only: they were made by running the published code, outside this
repository, on the tensors that ``tensor`` draws.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pospre import draws
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.sizes import EncoderSize
from pospre.nn.vit import Encoder
from pospre.nn.weights.names import timm_name

FIXTURES = Path(__file__).parent / "fixtures"
DECODER: dict[str, Any] = {"decoder_dim": 32, "decoder_depth": 2, "decoder_heads": 4}


def tensor(name: str, shape: tuple[int, ...], scale: float) -> Tensor:
    """Return the uniform draw in [-scale, scale) that belongs to ``name``."""
    key = draws.sample_keys(1, 0, np.array([0]), 0, f"fixture/{name}")
    values = draws.uniform(key, int(np.prod(shape)))[0]
    return torch.from_numpy((values - 0.5).reshape(shape) * 2 * scale)


def small_encoder(**options: Any) -> Encoder:
    """Return the encoder of the fixtures: 48 px, 6x6 patches of 8 px, width 48, two blocks."""
    size = EncoderSize("vit_tiny_patch16_224", 16, 48, 12, 3)
    grid: dict[str, Any] = {"image_size": (48, 48), "patch_size": (8, 8), "depth": 2}
    return Encoder(size, EncoderOptions("", **grid, **options))


def small_model(*algorithms: PretrainAlgorithm) -> PretrainModel:
    """Return the model of the fixtures."""
    return PretrainModel(small_encoder(), algorithms, seed=0)


def official_name(name: str, *, position_task: bool) -> str:
    """Translate one of our parameter names into the official repository's."""
    if name == "places.named.droppos.mark":
        return "mask_pos_token"
    if name.startswith("encoder."):
        return timm_name(name.removeprefix("encoder."))
    _, _, objective, rest = name.split(".", 3)
    if rest == "mask_token":
        return rest
    prefix = "aux_decoder_" if objective == "mae" and position_task else "decoder_"
    return prefix + rest.replace("predict", "pred")


def load_weights(model: PretrainModel, *, position_task: bool) -> None:
    """Give ``model`` the weights that the official model had when it was recorded."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            theirs = official_name(name, position_task=position_task)
            if "norm" in theirs and theirs.endswith("weight"):
                parameter.copy_(1 + tensor(theirs, parameter.shape, 0.1))
            else:
                scale = 0.2 if parameter.ndim >= 2 else 0.1
                parameter.copy_(tensor(theirs, parameter.shape, scale))


def batch() -> dict[str, Tensor]:
    """Return a batch whose normalised images are replaced by ``official_images`` below."""
    return {
        "view/image": torch.zeros(4, 1, 3, 48, 48, dtype=torch.uint8),
        "view/flip": torch.zeros(4, 1, dtype=torch.bool),
        "index": torch.arange(4),
        "epoch": torch.zeros(4, dtype=torch.int64),
    }


def official_images() -> Tensor:
    """Return the recorded runs' normalised images: (4, 1, 3, 48, 48)."""
    return torch.stack([tensor(f"image{i}", (3, 48, 48), 2.0) for i in range(4)]).unsqueeze(1)


class RecordedImages(nn.Module):
    """Stands where flip and normalisation stand, and returns the recorded images."""

    def forward(self, *given: object) -> Tensor:
        """Return them, whatever is given."""
        return official_images()


def fixture(name: str) -> dict[str, Any]:
    """Return the recorded cases of one official repository."""
    return json.loads((FIXTURES / f"{name}_official.json").read_text())["cases"]


def assert_recorded(value: Tensor | None, recorded: dict[str, float], name: str) -> None:
    """Compare a tensor's norm and its projection on a recorded direction, to 1e-4."""
    assert value is not None, name
    probe = tensor(f"probe/{name}", tuple(value.shape), 1.0).double()
    # a k-bias has no gradient in exact arithmetic: rounding is all there is to compare
    tolerance = 1e-4 * recorded["norm"] + 1e-7
    assert abs(float(value.double().norm()) - recorded["norm"]) <= tolerance, name
    bound = tolerance * float(probe.norm())
    assert abs(float((value.double() * probe).sum()) - recorded["probe"]) <= bound, name


def assert_same_gradients(
    model: PretrainModel, recorded: dict[str, Any], *, position_task: bool
) -> None:
    """Compare every gradient with the recorded one."""
    checked = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        theirs = official_name(name, position_task=position_task)
        if theirs not in recorded:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        checked.add(theirs)
        assert_recorded(parameter.grad, recorded[theirs], theirs)
    assert checked == set(recorded)
