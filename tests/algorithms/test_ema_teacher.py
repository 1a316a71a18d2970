"""The average of the weights: what follows, who may use it, and what it refuses."""

import pytest
import torch

from pospre import attach
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import Progress
from pospre.model.teacher import Momentum
from tests.algorithms.cases import DECODER, bare_model


def test_encoder_and_class_head_are_averaged() -> None:
    model = bare_model()
    attach(model, "supervised", num_classes=3)
    teacher = attach(model, "ema_teacher", momentum_start=0.75)
    assert len(model.teachers.pairs) == 2
    before = model.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    with torch.no_grad():
        for _, parameter in model.encoder.named_parameters():
            parameter.add_(1.0)
        model.objectives["supervised"].head.linear.bias.add_(1.0)  # type: ignore[union-attr,operator]
    teacher.after_step(model, Progress(0.5, 0.5))
    after = model.state_dict()
    key = "teacher.module.blocks.0.mlp.fc1.weight"
    torch.testing.assert_close(after[key], before[key] + 0.25)
    key = "objectives.named.supervised.teacher_head.module.linear.bias"
    torch.testing.assert_close(after[key], before[key] + 0.25)
    assert not any(p.requires_grad for _, copy in model.teachers.pairs for p in copy.parameters())


def test_the_first_teacher_counts_and_is_shared() -> None:
    model = bare_model()
    attach(model, "mae", **DECODER)
    attach(model, "ema_teacher", momentum_start=0.5, momentum_end=0.9, shape="linear")
    model.add_teacher("lut", None)
    assert model.teachers.momentum == Momentum(0.5, 0.9, "linear")


def test_lut_learns_from_the_average() -> None:
    groups = {name: ViewGroup(name=name, size=32) for name in ("view", "second")}
    model = bare_model(views=groups)
    attach(model, "mae", **DECODER)
    average = attach(model, "ema_teacher", momentum_start=0.5)
    lut = attach(model, "lut", momentum_start=None, hidden_dim=32)
    assert model.teachers.owner == "ema_teacher" and model.teachers.momentum == Momentum(
        0.5, 1.0, "constant"
    )
    assert model.teacher is not None
    before = model.teacher.module.state_dict()["cls_token"].clone()
    with torch.no_grad():
        model.encoder.cls_token.add_(1.0)  # type: ignore[union-attr]
    for algorithm in (lut, average):
        algorithm.after_step(model, Progress(0.0, 0.0))
    after = model.teacher.module.state_dict()["cls_token"]
    torch.testing.assert_close(after, before + 0.5)  # moved once


def test_two_momenta_are_refused() -> None:
    model = bare_model()
    model.add_teacher("lut", Momentum(0.9))
    with pytest.raises(UserError, match=r"'lut' has a teacher of its own"):
        attach(model, "ema_teacher")
    for options in ({"momentum_start": 1.0}, {"momentum_start": 0.9, "momentum_end": 0.5}):
        with pytest.raises(UserError, match=r"ema_teacher: the teacher's momentum"):
            attach(bare_model(), "ema_teacher", **options)
