"""The scheme that the algorithms' README shows is complete: one file, and its name."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pospre.nn import positions
from tests.algorithms.cases import Case, Options, written
from tests.algorithms.composition import README, refusal_of
from tests.model.test_leaks import Swap, case, check

FIELD: Options = {"crop_field": {"field_size": None}}  # it has no table


@pytest.fixture(autouse=True)
def projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _, code = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "projected.py").write_text(code)
    monkeypatch.setattr(positions, "__path__", [*positions.__path__, str(tmp_path)])
    monkeypatch.setitem(positions.SCHEMES, "projected", "projected:Projected")
    yield
    sys.modules.pop("pospre.nn.positions.projected", None)


@pytest.mark.parametrize(
    "names", [("mae",), ("ijepa", "stop"), ("dinov2", "crop_field", "masked_position"), ("mp3",)]
)
def test_methods_train_and_resume_under_it(names: tuple[str, ...]) -> None:
    assert refusal_of(Case(names, FIELD, {"positions": "projected"})) is None


def test_it_learns() -> None:
    chosen = Case(("droppos", "crop_field"), FIELD, {"positions": "projected"})
    model = chosen.build()
    batch = written(model, chosen.batch())
    model.loss(model(batch), batch)["total"].backward()
    (weight,) = model.encoder.positions.parameters()
    assert weight.grad is not None and weight.grad.any()


@pytest.mark.parametrize("names", [("droppos",), ("droppos", "crop_field")])
def test_hidden_places_reach_no_token(names: tuple[str, ...]) -> None:
    check(Swap(names, case(names, "projected", True)))


def test_images_of_another_size_have_places() -> None:
    model = Case(("supervised",), encoder={"positions": "projected"}).build()
    assert torch.isfinite(model.encoder(torch.randn(1, 3, 48, 64))).all()
