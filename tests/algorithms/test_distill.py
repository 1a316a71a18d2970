"""Feature distillation: the golden numbers of its distances, and its options."""

import pytest
import torch

from pospre.algorithms.distill import distances
from pospre.model.comparison import half_squared_distance
from tests.algorithms.cases import Case, random_views, written
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
