"""Loss to 1e-5 and gradients to 1e-4 against numbers recorded from the published code."""

from typing import Any

import pytest
import torch

from pospre.algorithms.droppos import DropPos
from pospre.algorithms.mae import MAE
from tests.algorithms.official import (
    DECODER,
    RecordedImages,
    assert_same_gradients,
    batch,
    fixture,
    load_weights,
    small_model,
)

pytestmark = pytest.mark.science

DROPPOS: dict[str, dict[str, Any]] = {
    "affinity_sigma1": {},
    "plain_sigma0": {"temperature": None},
    "plain_sigma2": {"temperature": None},
    "zeros": {"position_token": "zeros"},
    "multi_task": {"weight": 0.05},
    "ignore_confident": {"temperature": None, "ignore_confident": True},
}


@pytest.mark.parametrize("case", ["norm_pix", "raw_pixels"])
def test_mae_equals_the_official_code(case):
    recorded = fixture("mae")[case]
    model: Any = small_model(MAE(norm_pix=case == "norm_pix", **DECODER))
    model.augment = RecordedImages()
    load_weights(model, position_task=False)
    order = torch.tensor(recorded["order"])
    inputs = batch() | {"view/visible": order[:, :9], "view/hidden": order[:, 9:]}
    loss = model.loss(model(inputs), inputs)["total"]
    loss.backward()
    assert abs(float(loss) - recorded["loss"]) < 1e-5
    assert_same_gradients(model, recorded["gradients"], position_task=False)


@pytest.mark.parametrize("case", list(DROPPOS))
def test_droppos_equals_the_official_code(case):
    recorded = fixture("droppos")[case]
    hosts = [MAE(mask_ratio=0.5, **DECODER)] if case == "multi_task" else []
    droppos = DropPos(
        official=True,
        mask_ratio=None if case == "multi_task" else 0.5,
        position_mask_ratio=0.6,
        sigma_start=recorded["sigma"],
        **DECODER,
        **DROPPOS[case],
    )
    model: Any = small_model(droppos, *hosts)
    model.augment = RecordedImages()
    load_weights(model, position_task=True)
    if case == "ignore_confident":  # recorded with a head bold enough to be confident at times
        with torch.no_grad():
            model.objectives["droppos"].predict.weight.mul_(2)
    keep = torch.tensor(recorded["keep"])
    removed = torch.tensor(recorded["restore"]).argsort(1)[:, keep.shape[1] :]
    inputs = batch() | {
        "view/visible": keep,
        "view/hidden": removed,
        "droppos/known": ~torch.tensor(recorded["mask_pos"]).bool(),
    }
    outputs = model(inputs)
    terms = model.loss(outputs, inputs)
    terms["total"].backward()
    assert abs(float(terms["total"]) - recorded["loss"]) < 1e-5
    if case == "multi_task":
        assert abs(float(terms["droppos"]) - recorded["loss_droppos"]) < 1e-5
        assert abs(float(terms["mae"]) - recorded["loss_mae"]) < 1e-5
    assert_same_gradients(model, recorded["gradients"], position_task=True)
    if case == "ignore_confident":  # the recorded run did leave some patches out
        model.objectives["droppos"].ignore_confident = False
        assert abs(float(model.loss(outputs, inputs)["total"]) - recorded["loss"]) > 1e-3
