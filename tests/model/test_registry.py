"""How algorithms share passes: what is joined, what is needed, and who reads what."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

from pospre import algorithms
from pospre.arguments import check_arguments
from pospre.errors import UserError
from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from tests.algorithms.cases import Case, written
from tests.algorithms.composition import README, refusal_of


class LastPatch(Objective):
    """An author's objective: it reads the last patch token of the pass ``student``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.predict = nn.Linear(dim, 1)

    def forward(self, passes: dict[str, Tensor], batch: dict[str, Tensor]) -> Outputs:
        assert set(passes) == {"student"}
        return {"last": self.predict(passes["student"][:, -1]), "tokens": passes["student"]}

    def loss(self, outputs: Outputs, batch: dict[str, Tensor]) -> Tensor:
        return outputs["last"].square().mean()


def beside(*hosts: str) -> tuple[PretrainModel, dict[str, Tensor]]:
    """Return a model of these hosts, and a batch that they have written into."""
    case = Case(hosts)
    model, algorithms = case.build()
    return model, written(model, algorithms, case.batch(2))


@pytest.mark.parametrize(
    ("host", "keep", "count"),
    [("supervised", None, 64), ("mae", "view/visible", 16), ("ijepa", "view/visible", 16)],
)
def test_a_method_that_joins_a_host_gets_the_patches_that_it_needs(
    host: str, keep: str | None, count: int
) -> None:
    model, batch = beside(host)
    joined = model.registry.join_pass("student", "last_patch")
    assert (joined.visible, joined.count) == (keep, count)
    model.add_objective("last_patch", LastPatch(model.encoder.embed_dim))
    model.check_complete()
    outputs = model(batch)
    prefix = model.encoder.num_prefix_tokens
    assert outputs["last_patch"]["tokens"].shape[1] == prefix + count
    assert model.loss(outputs, batch)["last_patch"].requires_grad


def test_the_host_alone_computes_only_the_patches_that_are_needed() -> None:
    model, batch = beside("supervised")
    assert not model.registry.passes["student"].needs_patches
    joined = model.registry.join_pass("student", "classes", needs_patches=False)
    assert not joined.needs_patches
    assert model.run_pass("student", model.images(batch), batch).shape[1] == 1


def test_an_objective_that_joins_no_pass_is_refused_at_build() -> None:
    model, _ = beside("supervised")
    model.add_objective("last_patch", LastPatch(model.encoder.embed_dim))
    with pytest.raises(UserError, match=r"'last_patch' reads no encoder pass.*join_pass"):
        model.check_complete()


def test_joining_a_pass_that_does_not_run_is_refused() -> None:
    model, _ = beside("mae")
    with pytest.raises(UserError, match=r"last_patch joins the encoder pass 'global'.*'student'"):
        model.registry.join_pass("global", "last_patch")


def test_editors_of_a_joined_pass_form_a_chain() -> None:
    model, _ = beside("mae")
    for editor in ("first", "second", "first"):
        joined = model.registry.join_pass("student", "test", places=(editor,))
    assert joined.places == ("first", "second") and joined.visible == "view/visible"
    assert joined.count == 16


def test_an_editor_that_was_never_added_is_refused_at_build() -> None:
    model, _ = beside("mae")
    model.registry.join_pass("student", "test", places=("hidden",))
    message = r"'student' names the editor 'hidden' in its places, but model\.places\.named"
    with pytest.raises(UserError, match=message):
        model.check_complete()
    model.places.named["hidden"] = nn.Identity()
    model.check_complete()


def test_places_that_nothing_tells_cannot_be_edited() -> None:
    model, _ = Case(("supervised",), encoder={"positions": "none"}).build()
    with pytest.raises(
        UserError, match=r"test changes .* \(hidden\), .*encoder\.positions = none has none"
    ):
        model.registry.join_pass("student", "test", places=("hidden",))
    model.registry.join_pass("student", "test")


def test_two_algorithms_cannot_change_the_places_of_one_pass() -> None:
    model, _ = Case(("supervised",), encoder={"positions": "relative"}).build()
    model.registry.join_pass("student", "test", places=("hidden",))
    model.registry.join_pass("student", "test", places=("hidden", "moved"))
    with pytest.raises(UserError, match=r"other and test both change the places of .* 'student'"):
        model.registry.join_pass("student", "other", places=("strewn",))
    assert model.registry.passes["student"].places == ("hidden", "moved")


@pytest.fixture
def rows_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put the method that the algorithms' README shows beside the others; return its name."""
    code, _ = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "rows_apart.py").write_text(code)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    yield "rows_apart"
    sys.modules.pop("pospre.algorithms.rows_apart", None)


def test_the_method_that_the_readme_shows_is_complete(rows_apart: str) -> None:
    assert rows_apart in algorithm_names()
    alone = Case((rows_apart,), encoder={"positions": "none"})
    assert refusal_of(alone) is None
    assert refusal_of(Case(("supervised", rows_apart), encoder={"positions": "none"})) is None
    refused = refusal_of(Case(("supervised", rows_apart)))
    assert refused is not None and "Set encoder.positions: none" in refused
    refused = refusal_of(Case(("mae", rows_apart)))
    assert refused is not None and "over different tokens" in refused


def test_a_file_without_an_algorithm_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from pospre.model.algorithm import PretrainAlgorithm\n"
    unfinished = code + "class Base(PretrainAlgorithm): pass\n"
    whole = "class Whole(Base):\n    def attach(self, model): ...\n    write = attach\n"
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    for name, text in (("sketch_1", code), ("sketch_2", unfinished)):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(UserError, match=rf"{name}\.py defines no PretrainAlgorithm with"):
            algorithm_class(name)
    (tmp_path / "sketch_3.py").write_text(unfinished + whole)
    assert algorithm_class("sketch_3").__name__ == "Whole"  # not the base before it
    with pytest.raises(UserError, match=r"unknown key 'sketch_3\.pairs'\. Known: none\."):
        check_arguments("sketch_3", algorithm_class("sketch_3"), {"pairs": 1}, source="algorithms")
