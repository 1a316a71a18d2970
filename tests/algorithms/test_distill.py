"""Feature distillation: the golden numbers of its distances, and its options."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.algorithms.distill.distill import Distill, distances
from pospre.algorithms.distill.targets import equalising_turn, hadamard, place_directions, spread
from pospre.errors import UserError
from pospre.model.calibration import calibrate
from pospre.model.comparison import half_squared_distance
from pospre.model.model import PretrainModel
from pospre.model.objective import Sampled
from pospre.model.reference import rolled
from tests.algorithms.cases import Case, random_views, tiny_model, written
from tests.algorithms.test_gram import STUDENT, TARGET


def test_golden_numbers() -> None:
    shifted = distances(STUDENT + 1, TARGET + 1, "cosine").mean()  # each patch, not the image
    for value, number in (
        (shifted, 0.185626),
        (distances(STUDENT, TARGET, "smooth_l1").mean(), 1.708333),
        (distances(STUDENT, TARGET, "mse").mean(), 7.416667),
    ):
        assert value.item() == pytest.approx(number, abs=1e-6)
    vectors = torch.randn(1000, 384)
    assert not half_squared_distance(vectors, vectors).any()


@pytest.mark.parametrize("distance", ["cosine", "mse", "smooth_l1"])
def test_the_class_token_counts_unless_its_weight_is_zero(distance: str) -> None:
    case = Case(("distill",), options={"distill": {"distance": distance, "class_weight": 0.5}})
    model = case.build()
    batch = written(model, case.batch())
    outputs = model(batch)
    patches, token = (outputs["distill"][key] for key in ("patches", "class"))
    torch.testing.assert_close(model.loss(outputs, batch)["distill"], patches + 0.5 * token)
    without = Case(("distill",), {"distill": {"class_weight": 0.0}}, {"class_token": False})
    assert "class" not in without.build()(batch)["distill"]


def test_nothing_but_the_student_learns() -> None:
    model = Case(("distill",)).build()
    batch = written(model, {**random_views(side=32), "label": torch.zeros(4)})
    model.loss(model(batch), batch)["total"].backward()
    learning = [name for name, each in model.named_parameters() if each.grad is not None]
    assert learning and all(name.startswith("encoder.") for name in learning)


def test_golden_numbers_of_standardised_features() -> None:
    features = (7 * torch.arange(32) % 11).double().view(8, 4)
    other, scale = features.roll(1, 0), spread(features)
    turn = equalising_turn(features)
    apart = features / scale, other / scale
    for value, number in (
        (scale.square(), 11.370536),
        (distances(features, other, "mse").mean(), 29.25),
        (distances(*apart, "mse").mean(), 2.572438),
        (distances(apart[0] @ turn, apart[1] @ turn, "mse").mean(), 2.572438),
        (distances(*apart, "smooth_l1").mean(), 1.064689),
    ):
        assert value.item() == pytest.approx(number, abs=1e-6)
    torch.testing.assert_close((apart[0] @ turn).var(0), torch.ones(4).double())
    each_channel = (features - other) / features.std(0)
    assert each_channel.square().mean().item() == pytest.approx(2.625022, abs=1e-6)


@pytest.mark.parametrize("size", [1, 4, 12, 20, 192, 384, 768, 1024, 1280, 1536])
def test_hadamard_matrices(size: int) -> None:
    matrix = hadamard(size)
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size).double())
    assert bool((matrix.abs() == 1).all())


def test_directions_of_places_are_found_and_no_more() -> None:
    generator = torch.Generator().manual_seed(0)
    grid, views = (4, 6), 64
    places = torch.arange(24).repeat(views)
    directions = torch.linalg.qr(torch.randn(48, 3, generator=generator)).Q
    of_place = torch.randn(24, 3, generator=generator)
    of_place[:, 0], of_place[:, 1] = places[:24] // 6 - 1.5, places[:24] % 6 - 2.5
    features = torch.randn(24 * views, 48, generator=generator)
    features += 3 * of_place[places] @ directions.T + 5
    sampled = Sampled(features[:views], features, places, grid)
    found = place_directions(sampled)
    assert found.shape[1] in (2, 3)
    inside = (directions.double().T @ found).square().sum(0)
    assert bool((inside > 0.98).all())
    noise = sampled._replace(patches=torch.randn(features.shape, generator=generator))
    assert place_directions(noise).shape[1] == 0
    places = torch.arange(64).repeat(views)
    each = torch.eye(64)[places]  # a direction for each place
    many = Sampled(each, each, places, (8, 8))
    with pytest.raises(UserError, match=r"places can still be read \(R² 0\.\d+\) without 32"):
        place_directions(many)


def repositioned(reference: str = "learned", **options: Any) -> PretrainModel:
    """Return a model with torus positions whose reference has strong other ones."""
    frozen = tiny_model(positions=reference).vit
    with torch.no_grad():
        for parameter in frozen.positions.parameters():
            parameter.normal_()
    return tiny_model(Distill(**options), reference=frozen, positions="torus")


def targets(model: PretrainModel, batch: dict[str, Tensor]) -> Tensor:
    name = next(name for name, each in model.layout.passes.items() if each.reference)
    images = model.pass_images(model.layout.passes[name], batch)
    return model.run_pass(name, images, batch)


def test_targets_are_means_over_shifted_views() -> None:
    images = torch.randn(2, 3, 8, 12)
    moved = rolled(images, torch.tensor([[3, -2], [0, 5]]))
    for one, own, shift in zip(moved, images, [(3, -2), (0, 5)], strict=True):
        assert torch.equal(one, own.roll(shift, (1, 2)))
    batch = written(repositioned(), random_views())
    plain, torus = (
        targets(repositioned("torus", target=each), batch) for each in ("raw", "rolled")
    )
    torch.testing.assert_close(torus, plain, rtol=0, atol=1e-4)  # shifts change nothing there
    raw, one, two, again = (
        targets(repositioned(target="rolled", num_rolls=n) if n else repositioned(), batch)
        for n in (0, 1, 2, 2)
    )
    assert torch.equal(two, again) and raw.shape == two.shape
    changes = [(first - second).abs().mean() for first, second in ((raw, one), (one, two))]
    assert min(changes) > 0.01
    other = targets(repositioned(target="rolled"), {**batch, "index": batch["index"].flip(0)})
    assert not torch.allclose(other, targets(repositioned(target="rolled"), batch), atol=1e-3)


def test_fitted_targets_are_fitted_first() -> None:
    options = {"target": "debiased", "distance": "mse", "standardise": "isotropic"}
    model, batches = repositioned(**options), [random_views(size=16, seed=n) for n in range(4)]
    with pytest.raises(UserError, match=r"fitted to the reference's features first: pospre\.cal"):
        model(dict(batches[0]), progress=0.0)
    assert calibrate(model, batches, from_weights=False) == 64
    model(dict(batches[0]), progress=0.0)
    fitted: Any = model.objectives["distill"]
    kept = int(fitted.directions.norm(dim=0).sum().round())
    assert 1 <= kept < 32 and fitted.spread > 0
    twin = repositioned(**options)
    twin.load_state_dict(model.state_dict())
    batch = written(model, random_views())
    assert torch.equal(*(each(batch)["distill"]["patches"] for each in (model, twin)))
