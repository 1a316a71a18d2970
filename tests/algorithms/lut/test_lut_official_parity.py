"""LUT's losses to 1e-5 and gradients to 1e-4 against numbers recorded from the published code."""

import pytest
import torch
from torch import Tensor, nn

from pospre.algorithms.lut.lut import LUT, BroaderContext
from pospre.algorithms.mae import MAE
from pospre.data.views.options import ViewGroup
from pospre.model.model import PretrainModel
from tests.algorithms.official import (
    DECODER,
    assert_recorded,
    batch,
    fixture,
    official_name,
    small_encoder,
    tensor,
)

pytestmark = pytest.mark.science


def images(group: str) -> Tensor:
    prefix = "" if group == "view" else "second/"
    views = [tensor(f"{prefix}image{i}", (3, 48, 48), 2.0) for i in range(4)]
    return torch.stack(views).unsqueeze(1)


def theirs(name: str) -> str:
    name = name.removeprefix("objectives.named.lut.")
    if name.startswith(("head.", "predictor.")):
        return name
    return official_name(name, position_task=False)


def fill(values: dict[str, Tensor], prefix: str = "") -> None:
    """Give parameters and statistics, by official name, their recorded values."""
    with torch.no_grad():
        for name, value in values.items():
            if not value.is_floating_point() or "pos_embed" in name:
                continue
            ones = value.ndim == 1 and name.endswith(("weight", "running_var"))
            drawn = tensor(prefix + name, tuple(value.shape), 0.2 if value.ndim >= 2 else 0.1)
            value.copy_(drawn + float(ones))


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return module.state_dict(keep_vars=True)


def teacher_head(model: PretrainModel) -> nn.Module:
    return model.objectives.of(BroaderContext).teacher_head.module


def recorded_model() -> PretrainModel:
    groups = {name: ViewGroup(name=name, size=48) for name in ("view", "second")}
    lut = LUT(symmetric=True, hidden_dim=64, weight=0.25)
    model = PretrainModel(small_encoder(), [MAE(**DECODER), lut], seed=0, views=groups)
    student = {
        theirs(name): value
        for name, value in tensors(model).items()
        if "teacher" not in name and (value.requires_grad or "running" in name)
    }
    fill(student)
    assert model.teacher is not None
    head = teacher_head(model)
    fill(tensors(model.teacher.module), "teacher/")
    fill({f"head.{name}": value for name, value in tensors(head).items()}, "teacher/")
    return model


RECORDED = fixture("lut")["symmetric"]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> tuple[PretrainModel, dict[str, Tensor]]:
    """Return the model, and the batch that its recorded step is on."""
    model = recorded_model()
    monkeypatch.setattr(model, "images", lambda batch, group: images(group))
    order = torch.tensor(RECORDED["order"])
    inputs = batch() | {"view/visible": order[:, :9], "view/hidden": order[:, 9:]}
    return model, inputs | {"second/visible": order[:, 9:18]}


def test_lut_equals_the_official_code(step):
    recorded, (model, inputs) = RECORDED, step
    terms = model.loss(model(inputs), inputs)
    terms["total"].backward()
    assert abs(float(terms["mae"]) - recorded["loss_mae"]) < 1e-5
    assert abs(float(terms["lut"]) - recorded["loss_bc"]) < 1e-5
    assert abs(float(terms["total"]) - recorded["loss"]) < 1e-5

    gradients = {
        theirs(name): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert set(gradients) == set(recorded["gradients"])
    for name, gradient in gradients.items():
        assert_recorded(gradient, recorded["gradients"][name], name)

    # the student's batch norms saw both views, one after the other
    buffers = dict(model.objectives["lut"].named_buffers())
    for name, expected in recorded["buffers"].items():
        torch.testing.assert_close(buffers[name], torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_the_teacher_follows_as_the_official_one(step):
    recorded, (model, inputs) = RECORDED, step
    model(inputs)
    model.teachers.update(0.0)
    assert model.teacher is not None
    head = teacher_head(model)
    after = tensors(model.teacher.module) | {
        f"head.{name}": value for name, value in tensors(head).items()
    }
    assert recorded["teacher_after"].keys() <= after.keys()
    for name, expected in recorded["teacher_after"].items():
        assert_recorded(after[name], expected, name)
