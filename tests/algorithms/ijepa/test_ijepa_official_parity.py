"""I-JEPA and StoP against numbers recorded from their published code: masks, loss, gradients."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre import draws
from pospre.algorithms.ijepa.blocks import Blocks, draw_official
from pospre.algorithms.ijepa.ijepa import IJEPA
from pospre.algorithms.stop.stop import StoP
from pospre.model.model import PretrainModel
from tests.algorithms.official import (
    FIXTURES,
    RecordedImages,
    assert_recorded,
    batch,
    fixture,
    small_encoder,
    tensor,
)

pytestmark = pytest.mark.science

RENAMED = {
    "objectives.named.ijepa.predictor.embed": "predictor.predictor_embed",
    "objectives.named.ijepa.predictor.blocks": "predictor.predictor_blocks",
    "objectives.named.ijepa.predictor.norm": "predictor.predictor_norm",
    "objectives.named.ijepa.predictor.mask_token": "predictor.mask_token",
    "objectives.named.ijepa.predict": "predictor.predictor_proj",
    "teacher.module": "target",
    "encoder": "encoder",
}


def published_name(name: str) -> str:
    start = next(start for start in RENAMED if name.startswith(f"{start}."[: len(name)]))
    return RENAMED[start] + name.removeprefix(start)


def recorded_model(*others: StoP) -> PretrainModel:
    host = IJEPA(predictor_dim=32, predictor_depth=2, predictor_heads=4)
    model = PretrainModel(small_encoder(class_token=False), [host, *others], seed=0)
    model.augment = RecordedImages()  # type: ignore[assignment]
    return model


@torch.no_grad()
def load_weights(model: PretrainModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("pos_embed"):
            continue
        theirs = published_name(name)
        if "norm" in theirs and theirs.endswith("weight"):
            parameter.copy_(1 + tensor(theirs, parameter.shape, 0.1))
        else:
            parameter.copy_(tensor(theirs, parameter.shape, 0.2 if parameter.ndim >= 2 else 0.1))


def assert_as_recorded(
    model: PretrainModel, inputs: dict[str, Tensor], case: dict[str, Any]
) -> None:
    outputs = model(inputs)
    loss = model.loss(outputs, inputs)["total"]
    loss.backward()
    assert abs(float(loss) - case["loss"]) < 1e-5
    predicted = outputs["ijepa"]["predicted"].double()
    assert float(predicted.sum()) == pytest.approx(case["predicted_sum"], rel=1e-4)
    checked = set()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        theirs = published_name(name)
        checked.add(theirs)
        assert_recorded(parameter.grad, case["gradients"][theirs], theirs)
    assert checked == set(case["gradients"])


def recorded_inputs(case: dict[str, Any]) -> dict[str, Tensor]:
    masks = {
        "view/visible": torch.tensor(case["context"]),
        "ijepa/targets": torch.tensor(case["targets"]),
    }
    return batch() | masks


def test_ijepa_equals_the_official_code() -> None:
    case, model = fixture("ijepa")["published"], recorded_model()
    load_weights(model)
    assert_as_recorded(model, recorded_inputs(case), case)


def test_stop_equals_its_official_code() -> None:
    case = fixture("stop")["official"]
    model = recorded_model(StoP(official=True, noise_std=0.25))
    load_weights(model)
    inputs = recorded_inputs(case)
    rows, blocks, tokens = inputs["ijepa/targets"].shape
    noise = [tensor(f"noise{block + 1}", (rows, tokens, 48), 2.0) for block in range(blocks)]
    inputs["stop/masked"] = torch.stack(noise, dim=1)
    assert_as_recorded(model, inputs, case)
    assert model.objectives["ijepa"].predictor.mask_token.grad is None  # type: ignore[union-attr]


MASKS = json.loads((FIXTURES / "ijepa_masks_official.json").read_text())["cases"]


@pytest.mark.parametrize("name", list(MASKS))
def test_masks_equal_the_official_collator_given_the_same_random_numbers(name: str) -> None:
    case = MASKS[name]
    grid = (case["grid"], case["grid"])
    blocks = Blocks(grid, 4, tuple(case["scale"]), (0.75, 1.5), tuple(case["context"]), 1, 1)
    index = torch.arange(case["batch"])
    masks = draw_official(draws.sample_keys(0, case["epoch"], index, 0, "ijepa/blocks"), blocks)
    assert masks.context.tolist() == case["masks_context"]
    assert masks.targets.tolist() == case["masks_targets"]
