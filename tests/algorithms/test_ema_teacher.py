"""The average of the weights, beside a host and as another method's teacher."""

import pytest
import torch

from pospre.algorithms.ema_teacher import EmaTeacher
from pospre.algorithms.lut.lut import LUT
from pospre.algorithms.supervised.supervised import Supervised
from pospre.model.progress import Progress
from pospre.model.teacher import Momentum
from tests.algorithms.cases import GROUPS, made, tiny_model


def test_encoder_and_class_head_are_averaged() -> None:
    model = tiny_model(EmaTeacher(momentum_start=0.75), Supervised(num_classes=3))
    assert len(model.teachers.pairs) == 2
    before = model.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    with torch.no_grad():
        for _, parameter in model.encoder.named_parameters():
            parameter.add_(1.0)
        model.objectives["supervised"].head.linear.bias.add_(1.0)  # type: ignore[union-attr,operator]
    model.after_step(Progress(0.5, 0.5))
    after = model.state_dict()
    key = "teacher.module.blocks.0.mlp.fc1.weight"
    torch.testing.assert_close(after[key], before[key] + 0.25)
    key = "objectives.named.supervised.teacher_head.module.linear.bias"
    torch.testing.assert_close(after[key], before[key] + 0.25)
    assert not any(p.requires_grad for _, copy in model.teachers.pairs for p in copy.parameters())


@pytest.mark.parametrize("momentum", [None, 0.996])
def test_lut_learns_from_the_average(momentum: float | None) -> None:
    lut = LUT(momentum_start=momentum, hidden_dim=32)
    views = {name: GROUPS[name] for name in ("view", "second")}
    model = tiny_model(lut, EmaTeacher(momentum_start=0.5), made("mae"), views=views)
    assert model.teachers.owner == "ema_teacher"
    assert model.teachers.momentum == Momentum(0.5, 1.0, "constant")
    assert model.teacher is not None
    before = model.teacher.module.state_dict()["cls_token"].clone()
    with torch.no_grad():
        model.encoder.get_parameter("cls_token").add_(1.0)
    model.after_step(Progress(0.0, 0.0))
    after = model.teacher.module.state_dict()["cls_token"]
    torch.testing.assert_close(after, before + 0.5)  # moved once
