"""New heads on published weights: what goes in is standardised, and images no longer look alike."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.algorithms.dinov2.losses import soft_cross_entropy
from pospre.algorithms.dinov2.prototype_task import PrototypeHead
from pospre.model.calibration import calibrate, centre
from tests.algorithms.cases import Case


def mean_cosine(vectors_RD: Tensor) -> float:
    unit = F.normalize(vectors_RD, dim=-1)
    return ((unit @ unit.T).sum() - len(unit)).item() / (len(unit) * (len(unit) - 1))


@pytest.mark.parametrize("layers", [1, 3])
def test_a_shared_direction_and_scales_leave_the_bottleneck(layers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(48, generator=generator) * 3 + 0.1
    tokens = torch.randn(384, 48, generator=generator) * scales + 4 * scales
    mlp = PrototypeHead(48, 32, hidden=64, bottleneck=32, layers=layers).mlp
    assert mean_cosine(mlp(tokens)) > 0.5
    expected = mlp[0](((tokens - tokens.mean(0)) / tokens.std(0)).detach())
    with torch.no_grad():
        centre(mlp, tokens)
        assert mean_cosine(mlp(tokens)) < 0.05
    if layers > 1:
        torch.testing.assert_close(mlp[0](tokens), expected, rtol=1e-4, atol=1e-5)
    assert mlp(tokens).mean(0).abs().max() < 1e-5


@pytest.mark.parametrize("separate", [False, True])
def test_every_head_is_fitted_and_its_teacher_is_the_same(separate: bool) -> None:
    case = Case(("dinov2", "masked_position"), {"dinov2": {"separate_heads": separate}})
    model, twin = case.build(), case.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert calibrate(model, [case.batch(6), case.batch(4)]) == 20
    calibrate(twin, [case.batch(6), case.batch(4)])
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    names = ["dinov2.head", "dinov2.teacher_head.module", "masked_position.head"]
    names += ["dinov2.patch_head", "dinov2.teacher_patch_head.module"] if separate else []
    for name in names:
        assert f"objectives.named.{name}.mlp.0.weight" in changed
    assert all(".mlp." in key for key in changed) and model.training
    for student, teacher in model.teachers.pairs:
        pairs = zip(student.parameters(), teacher.parameters(), strict=True)
        assert all(own.equal(copy) for own, copy in pairs)
    assert all(twin.state_dict()[key].equal(value) for key, value in model.state_dict().items())
    alone = Case(("dinov2",), {"dinov2": {"fit_heads": False}})
    assert alone.layout().uses["dinov2"].calibrates == ()


@pytest.mark.parametrize(
    ("count", "start"), [(4096, 8.317766), (65536, 11.090355), (262144, 12.476649)]
)
def test_equal_logits_cost_ln_k(count: int, start: float) -> None:
    logits = torch.zeros(1, count)
    loss = soft_cross_entropy(logits, logits.softmax(-1), 0.1).item()
    assert loss == pytest.approx(start, abs=1e-5) and math.log(count) == pytest.approx(start)
