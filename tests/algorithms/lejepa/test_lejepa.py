"""LeJEPA and SIGReg: the golden numbers, the scale, ranks, slices, and DINOv2's use of it."""

import pytest
import torch
from torch import Tensor

from pospre.algorithms.dinov2.dinov2 import PrototypeMatching
from pospre.algorithms.lejepa.lejepa import ViewAgreement, invariance
from pospre.algorithms.lejepa.sigreg import SIGReg
from pospre.errors import UserError
from pospre.model.progress import Progress
from tests.algorithms.cases import Case, written

GOLDEN = torch.tensor([[((7 * n + 5 * d) % 11) / 5 - 1 for d in range(3)] for n in range(6)])
GOLDEN = GOLDEN.double()
SLICES = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1], [1, -1, 0]]).double().T


def sigreg_of(slices: Tensor) -> SIGReg:
    made = SIGReg(*slices.shape)
    made.slices_DS = slices / slices.norm(dim=0)
    return made


def test_the_golden_numbers() -> None:
    """As of lightly.loss.LeJEPALoss, with these slices."""
    each = [float(sigreg_of(SLICES[:, [k]])(GOLDEN[None])) for k in range(4)]
    assert each == pytest.approx([0.314908, 0.622046, 1.067855, 0.149710], abs=1e-6)
    views = torch.stack([GOLDEN, GOLDEN.flip(0) / 2, GOLDEN + 0.25])
    alike, spread = float(invariance(views, 2)), float(sigreg_of(SLICES)(views))
    assert (alike, spread) == pytest.approx((0.159815, 0.937089), abs=1e-6)
    assert 0.95 * alike + 0.05 * spread == pytest.approx(0.198679, abs=1e-6)


def test_gaussian_features_cost_the_same_however_many_and_equal_ones_each() -> None:
    test = SIGReg(16, 256)
    test.draw(0, Progress(0.5, 0.5))
    for count in (64, 1024):
        assert float(test(torch.randn(4, count, 16))) == pytest.approx(1.0525, abs=0.15)
        assert float(test(torch.ones(1, count, 16) * 0)) == pytest.approx(0.402 * count, rel=1e-3)
    with pytest.raises(UserError, match=r"SIGReg of 2 samples costs less if features are equal"):
        test(torch.randn(1, 2, 16))
    assert test.eval()(torch.randn(1, 2, 16)).isfinite()


def test_slices_are_functions_of_seed_and_step() -> None:
    def drawn(seed: int, progress: Progress) -> Tensor:
        test = SIGReg(8, 32)
        test.draw(seed, progress)
        return test.slices_DS

    first = drawn(1, Progress(0.25, 0.0, 1000))
    assert SIGReg(8, 32)(torch.randn(1, 4, 8)).isnan()  # as of a batch that was not prepared
    torch.testing.assert_close(first.norm(dim=0), torch.ones(32))
    assert torch.equal(first, drawn(1, Progress(0.125, 0.5, 2000)))  # step 250 as well
    for other in ((2, Progress(0.25, 0.0, 1000)), (1, Progress(0.251, 0.0, 1000))):
        assert not torch.allclose(first, drawn(*other), atol=0.1)
    one, two = (drawn(1, Progress(step / 10**6, 0.0)) for step in (1, 2))
    assert not torch.allclose(one, two, atol=0.1)


@pytest.mark.parametrize("class_token", [True, False])
def test_the_loss_is_of_the_projections_of_all_views(class_token: bool) -> None:
    case = Case(("lejepa",), encoder={"class_token": class_token, "positions": "learned"})
    model = case.build()
    inputs = written(model, case.batch())
    objective = model.objectives["lejepa"]
    assert isinstance(objective, ViewAgreement)
    seen: list[Tensor] = []
    objective.project.register_forward_hook(lambda _, given, out: seen.extend((*given, out)))
    outputs = model(inputs)
    projected = seen[1]  # two global and two local views of four images
    assert projected.shape[:2] == (4, 4)
    terms = model.loss(outputs, inputs)
    alike, spread = invariance(projected, 2), objective.sigreg(projected)
    torch.testing.assert_close(terms["lejepa"], 0.95 * alike + 0.05 * spread)
    assert {f"metric/lejepa_{name}" for name in ("inv", "sigreg", "std")} <= terms.keys()
    tokens = model.run_pass("local", model.images(inputs, "local"), inputs)
    pooled = tokens[:, 0] if class_token else tokens.mean(1)
    torch.testing.assert_close(seen[0][3], pooled.unflatten(0, (4, 2))[:, 1])


def test_dinov2_spreads_the_bottleneck_of_its_head() -> None:
    for spread, has_koleo in (("sigreg", False), ("both", True)):
        case = Case(("dinov2",), {"dinov2": {"spread": spread}})
        model = case.build()
        inputs = written(model, case.batch())
        objective = model.objectives["dinov2"]
        assert isinstance(objective, PrototypeMatching) and objective.sigreg is not None
        seen: list[Tensor] = []
        objective.sigreg.register_forward_pre_hook(lambda _, given, to=seen: to.append(given[0]))
        terms = model.loss(model(inputs), inputs)
        value = {key: terms[f"metric/dinov2_{key}"] for key in ("dino", "ibot", "sigreg")}
        koleo = terms.get("metric/dinov2_koleo")
        assert (koleo is not None) == has_koleo
        expected = value["dino"] + value["ibot"] + 0.05 * value["sigreg"] / 4
        if koleo is not None:
            expected = expected + 0.1 * koleo
        torch.testing.assert_close(terms["dinov2"].detach(), expected)
        tokens = model.run_pass("global", model.images(inputs, "global"), inputs)[:, 0]
        bottleneck = objective.head.mlp(tokens).unflatten(0, (4, 2)).transpose(0, 1)
        torch.testing.assert_close(seen[0], bottleneck)
        torch.testing.assert_close(value["sigreg"], objective.sigreg(bottleneck).detach())
