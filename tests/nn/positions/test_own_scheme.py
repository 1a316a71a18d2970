"""The scheme that the algorithms' README shows is complete, and named by its address."""

import importlib
from typing import Any

import pytest
import torch

from pospre import build_encoder
from pospre.nn.positions.rotary import Rotary
from tests.algorithms.cases import Case, Options, written
from tests.algorithms.composition import refusal_of
from tests.model.test_leaks import Swap, case, check
from tests.nn.positions.own_scheme import spiral  # noqa: F401
from tests.refusals import refuses

FIELD: Options = {"crop_field": {"field_size": None}}  # it has no table

pytestmark = pytest.mark.usefixtures("spiral")


@pytest.mark.parametrize(
    "names", [("mae",), ("ijepa", "stop"), ("dinov2", "crop_field", "masked_position"), ("mp3",)]
)
def test_methods_train_and_resume_under_it(names: tuple[str, ...], spiral: str) -> None:  # noqa: F811
    assert refusal_of(Case(names, FIELD, {"positions": spiral})) is None


def test_it_learns(spiral: str) -> None:  # noqa: F811
    chosen = Case(("droppos", "crop_field"), FIELD, {"positions": spiral})
    model = chosen.build()
    batch = written(model, chosen.batch())
    model.loss(model(batch), batch)["total"].backward()
    (weight,) = model.encoder.positions.parameters()
    assert weight.grad is not None and weight.grad.any()


@pytest.mark.parametrize("names", [("droppos",), ("droppos", "crop_field")])
def test_hidden_places_reach_no_token(names: tuple[str, ...], spiral: str) -> None:  # noqa: F811
    check(Swap(names, case(names, spiral, True)))


def test_images_of_another_size_have_places(spiral: str) -> None:  # noqa: F811
    model = Case(("supervised",), encoder={"positions": spiral}).build()
    assert torch.isfinite(model.encoder(torch.randn(1, 3, 48, 64))).all()


def test_a_class_is_named_by_its_address_and_ours_by_its_name(spiral: str) -> None:  # noqa: F811
    kind = importlib.import_module("mylab.spiral").Spiral

    def positions_of(given: Any) -> Any:
        encoder = build_encoder("vit_tiny16", image_size=32, depth=1, positions=given)
        assert encoder.options.positions == encoder.positions.as_given() or given is Rotary
        return encoder.positions.as_given()

    assert positions_of(kind) == positions_of(spiral) == spiral
    assert positions_of({kind: {"directions": 4}}) == {spiral: {"directions": 4}}
    assert positions_of(Rotary) == "rotary"


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ({"mylab.spiral:Spiral": {"direction": 4}}, r"Spiral\.direction'\. Did you .*'directions'"),
        ({"mylab.spiral:Spiral": {"directions": 0}}, r"Spiral\.directions' is 0 .*greater than 0"),
        ("mylab.spiral:Spirals", r"encoder\.positions: 'mylab.spiral:Spirals' .*mean 'Spiral'"),
        ("mylab.spiral:PositiveInt", r"encoder\.positions: 'mylab.spiral:PositiveInt' "),
        ("pospre.errors:UserError", "is no position scheme; derive it from pospre.Scheme"),
        ("mylab.spiral.Spiral", "Write your own class as package.module:Class"),
        ("mylab.helix:Helix", "no module 'mylab.helix'"),
        ("elsewhere.spiral:Spiral", r"another package, .*add --trust elsewhere\.spiral"),
    ],
)
def test_a_scheme_that_is_none_is_refused(positions: Any, words: str) -> None:
    refuses(words, lambda: build_encoder("vit_tiny16", image_size=32, depth=1, positions=positions))
