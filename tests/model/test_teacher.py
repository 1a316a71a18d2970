"""The momentum teacher: its schedule, what follows it, and who may ask for it."""

import pytest
import torch
from torch import nn

from pospre.algorithms.ema_teacher import EmaTeacher
from pospre.errors import UserError
from pospre.model.teacher import Frozen, Momentum, follow
from tests.algorithms.cases import made, random_views, tiny_model


def test_follow_moves_parameters_and_buffers_and_copies_counters() -> None:
    student = nn.BatchNorm1d(3)
    teacher = Frozen(student)
    with torch.no_grad():
        student.weight.fill_(3.0)
        student.running_mean.fill_(1.0)  # type: ignore[union-attr]
        student.num_batches_tracked.fill_(5)  # type: ignore[union-attr]
    follow([(student, teacher.module)], 0.75)
    copy = teacher.module
    assert isinstance(copy, nn.BatchNorm1d)
    torch.testing.assert_close(copy.weight, torch.full((3,), 1.5))
    torch.testing.assert_close(copy.running_mean, torch.full((3,), 0.25))
    assert int(copy.num_batches_tracked) == 5  # type: ignore[arg-type]


def test_frozen_stays_in_evaluation_mode_and_takes_no_gradient() -> None:
    frozen = Frozen(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))).train()
    inputs = torch.ones(4, 2, requires_grad=True)
    outputs = frozen(inputs)
    assert not outputs.requires_grad and not frozen.module.training
    assert torch.equal(outputs, frozen(inputs))


def test_teacher_pass_sees_every_patch_without_gradient() -> None:
    model = tiny_model(made("ijepa"))
    images = torch.randn(2, 1, 3, 32, 32)
    tokens = model.run_pass("teacher", images, random_views(size=2))
    assert tokens.shape == (2, 17, 192) and not tokens.requires_grad
    assert torch.equal(tokens, model.encoder(images[:, 0]).detach())


def test_the_teacher_has_its_own_copy_of_the_field() -> None:
    average = EmaTeacher(momentum_start=0.5)
    model = tiny_model(average, made("crop_field"), made("mae"), positions="learned")
    assert model.teacher is not None
    field, copy = (
        each.get_parameter("positions.pos_embed") for each in (model.encoder, model.teacher.module)
    )
    assert torch.equal(field, copy) and copy.shape == (1, 1 + 81, 192)
    assert field.requires_grad and not copy.requires_grad
    before = field.detach().clone()
    with torch.no_grad():
        field.add_(1)
    model.teachers.update(0.0)
    torch.testing.assert_close(copy, before + 0.5)


def test_a_teacher_needs_a_momentum_from_someone() -> None:
    for alone in (made("ijepa", momentum_start=None), made("droppos", affinity="teacher")):
        with pytest.raises(UserError, match=r"uses a momentum teacher, but .* Add ema_teacher"):
            tiny_model(alone)
        model = tiny_model(alone, EmaTeacher(momentum_start=0.9))
        assert model.teachers.momentum == Momentum(0.9, shape="constant")
