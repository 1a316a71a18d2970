"""SimMIM's loss to 1e-5 and gradients to 1e-4 against numbers recorded from the published code."""

import pytest
import torch
from torch import Tensor

from pospre.algorithms.simmim import SimMIM
from pospre.model.model import PretrainModel
from pospre.nn.masking import slot_mask
from tests.algorithms.official import (
    assert_recorded,
    batch,
    fixture,
    official_images,
    small_encoder,
    tensor,
)

pytestmark = pytest.mark.science

SIDE = 8


def theirs(name: str) -> list[str]:
    """Return the official names of one of our parameters; q, k and v have biases of their own."""
    if name == "contents.named.simmim.token":
        return ["encoder.mask_token"]
    if name.startswith("objectives."):
        return ["decoder.0." + name.rsplit(".", 1)[1]]
    if name.endswith("qkv.bias"):
        stem = name.removesuffix("qkv.bias")
        return [stem + "q_bias", "", stem + "v_bias"]
    for ours, official in (("ls1.gamma", "gamma_1"), ("ls2.gamma", "gamma_2")):
        name = name.replace(ours, official)
    return [name.replace("positions.table", "rel_pos_bias.relative_position_bias_table")]


def shuffled(value: Tensor) -> Tensor:
    """Put our head's outputs (row, column, channel) in the order of a pixel shuffle."""
    return (
        value.unflatten(0, (SIDE, SIDE, 3))
        .permute(2, 0, 1, *range(3, value.ndim + 2))
        .flatten(0, 2)
    )


def in_our_order(value: Tensor) -> Tensor:
    """Undo ``shuffled``."""
    return (
        value.unflatten(0, (3, SIDE, SIDE))
        .permute(1, 2, 0, *range(3, value.ndim + 2))
        .flatten(0, 2)
    )


def recorded_weight(name: str, shape: torch.Size) -> Tensor:
    if name == "":
        return torch.zeros(shape)  # the official keys have no bias
    ones = len(shape) == 1 and (name.endswith("weight") or "gamma" in name)
    return tensor(name, tuple(shape), 0.2 if len(shape) >= 2 else 0.1) + float(ones)


def load(model: PretrainModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            names = theirs(name)
            shape = torch.Size((parameter.shape[0] // len(names), *parameter.shape[1:]))
            value = torch.cat([recorded_weight(part, shape) for part in names])
            parameter.copy_(in_our_order(value) if name.startswith("objectives.") else value)


@pytest.mark.parametrize("case", ["shared_relative", "no_positions"])
def test_simmim_equals_the_official_code(case, monkeypatch):
    recorded = fixture("simmim")[case]
    encoder = small_encoder(positions="shared_relative", layer_scale=0.1, init="beit")
    model = PretrainModel(encoder, [SimMIM(mask_cell=16)], seed=0)
    load(model)
    if case == "no_positions":  # a bias of zeros; without any scheme simmim is refused
        table = encoder.get_parameter("positions.table")
        torch.nn.init.zeros_(table).requires_grad_(False)
    monkeypatch.setattr(model, "images", lambda batch, group: official_images())
    masked = torch.tensor(recorded["mask"]).flatten(1).bool()
    inputs = batch() | {"view/masked": masked}
    inputs["view/hidden"] = masked.nonzero()[:, 1].view(4, -1)
    assert torch.equal(slot_mask(inputs["view/hidden"], 36), masked)
    loss = model.loss(model(inputs), inputs)["total"]
    loss.backward()
    assert abs(float(loss) - recorded["loss"]) < 1e-5
    checked = set()
    trained = [each for each in model.named_parameters() if each[1].requires_grad]
    for name, parameter in trained:
        gradient = parameter.grad
        assert gradient is not None
        gradient = shuffled(gradient) if name.startswith("objectives.") else gradient
        for part, official in zip(gradient.chunk(len(theirs(name))), theirs(name), strict=True):
            if official == "":
                assert part.norm() < 1e-6  # softmax does not see the keys' bias
                continue
            checked.add(official)
            assert_recorded(part, recorded["gradients"][official], official)
    assert checked == set(recorded["gradients"])
