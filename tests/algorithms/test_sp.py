"""SP's target, what it is divided by, and that only pictures which tell the place teach it."""

import pytest
import torch
from torch import Tensor

from pospre.algorithms.sp import SP, RelativeViews, deviations, relations
from pospre.batch import Batch
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.position_task import Relations
from pospre.nn.build import build_encoder
from tests.algorithms.cases import Case
from tests.algorithms.control_pictures import batch_of, train

PAIR = ViewGroup(name="pair", count=2, size=16, scale=(0.05, 0.32), flip_rate=0.0)


def model_of(group: ViewGroup = PAIR, **options: object) -> PretrainModel:
    torch.manual_seed(0)
    encoder = build_encoder("speech8", image_size=16, patch_size=4, channels=3, depth=2)
    return PretrainModel(encoder, [SP(**options)], seed=3, views={"pair": group})  # type: ignore[arg-type]


def boxes(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_a_relation_is_the_distance_in_mean_sides_and_the_log_of_the_sides_ratio() -> None:
    first, second = boxes(0, 0, 0.5, 0.5), boxes(0.5, 0.25, 0.75, 0.75)
    found = relations(first, second)
    assert found[0].tolist() == pytest.approx([1.060660, 0.5, -0.693147, 0.0], abs=1e-6)
    assert torch.equal(relations(second, first), -found)
    assert not relations(first, first).any()
    wide = torch.tensor([4.0, 3.0, 4.0, 3.0], dtype=torch.float64)  # in pixels of another shape
    torch.testing.assert_close(relations(first * wide, second * wide), found)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [((0.05, 0.32), [0.64, 0.64, 0.37, 0.37]), ((0.1, 0.5), [0.40, 0.40, 0.33, 0.33])],
)
def test_errors_are_in_deviations_of_the_recipes_crops(
    scale: tuple[float, float], expected: list[float]
) -> None:
    found = deviations(scale, (3 / 4, 4 / 3))
    assert found == pytest.approx(expected, abs=0.008)
    head = model_of(ViewGroup(count=2, size=16, scale=scale)).objectives["sp"]
    assert isinstance(head, RelativeViews) and head.sigma.tolist() == pytest.approx(found)
    own = model_of(sigma=(0.8, 0.5, 0.37, 0.37)).objectives["sp"]
    assert isinstance(own, RelativeViews) and own.sigma[0] == pytest.approx(0.8)


def answers(model: PretrainModel, batch: Batch) -> Relations:
    head = model.objectives["sp"]
    assert isinstance(head, RelativeViews)
    with torch.no_grad():
        return head.answers(model.eval()(batch)["sp"], batch)


def test_mirrored_views_are_views_of_the_mirrored_image() -> None:
    model = model_of()
    batch = batch_of(model.views, 0, told=True, size=8)
    x0, y0, x1, y1 = batch["pair/box"].unbind(-1)
    mirrored = {
        **batch,
        "pair/box": torch.stack([1 - x1, y0, 1 - x0, y1], -1),
        "pair/image": batch["pair/image"].flip(-1),
        "pair/flip": torch.ones(8, 2, dtype=torch.bool),
    }
    plain, other = (answers(model, model.prepare(each, 0.0)) for each in (batch, mirrored))
    torch.testing.assert_close(plain.true, other.true)
    torch.testing.assert_close(plain.predicted, other.predicted)
    assert torch.equal(plain.true[:, 0], -plain.true[:, 1])


def test_both_views_are_mirrored_like_the_first() -> None:
    model = model_of()
    batch = batch_of(model.views, 0, told=True, size=2)
    batch["pair/flip"] = torch.tensor([[True, False], [False, True]])
    assert model.prepare(batch, 0.0)["pair/flip"].tolist() == [[True, True], [False, False]]


def test_it_learns_from_pictures_that_tell_the_place() -> None:
    """Sizes take longer to learn than places. Of others: tests/model/test_trained_leaks.py."""
    model = model_of()
    found = answers(model, next(train(model, 60, told=True, lr=5e-3)))
    mean, deviation = found.chance()
    above = found.score() > mean + 5 * deviation
    assert above[:2].all() and (found.score()[:2] > 0.8).all()


def test_measures_of_a_single_pair_are_no_lower_than_minus_1() -> None:
    model = model_of()
    batch = model.prepare(batch_of(model.views, 0, told=True, size=1), 0.0)
    outputs = {"predicted": torch.full((1, 2, 4), 9.0)}
    found = model.objectives["sp"].metrics(outputs, batch)
    assert all(found[key] == -1 for key in ("r2", "r2_place", "r2_size"))


def test_class_tokens_are_compared_if_asked_for() -> None:
    case = Case(("sp",), {"sp": {"pool": "class_token"}})
    assert not case.layout().passes["pair"].needs_patches


def test_without_boxes_there_is_no_target() -> None:
    model = model_of()
    batch = batch_of(model.views, 0, told=True, size=2)
    del batch["pair/box"]
    with pytest.raises(UserError, match=r"lacks 'pair/box'.*which sp needs"):
        model.prepare(batch, 0.0)
