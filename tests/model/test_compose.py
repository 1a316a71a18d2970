"""What methods declare becomes one layout, or is refused: no order of a list matters."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from pospre import algorithms
from pospre.arguments import check_arguments
from pospre.batch import Batch
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class, algorithm_names
from pospre.model.compose import compose
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.passes import EncoderPass
from pospre.model.uses import Hides, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import PatchMasking
from tests.algorithms.cases import GROUPS, Case, made, tiny_model, written
from tests.algorithms.composition import README, refusal_of


class LastPatch(Objective):
    """An author's objective: it reads the last patch token of the pass ``student``."""

    def __init__(self, encoder: PatchEncoder, options: Any) -> None:
        super().__init__()
        self.predict = nn.Linear(encoder.embed_dim, 1)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        assert set(passes) == {"student"}
        return {"last": self.predict(passes["student"][:, -1]), "tokens": passes["student"]}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return outputs["last"].square().mean()


@dataclass(kw_only=True, eq=False)
class Reads(PretrainAlgorithm):
    """An author's method that declares what a test wants."""

    objective: ClassVar[type[Objective] | None] = LastPatch
    declared: Mapping[str, Any] = field(default_factory=dict)

    def uses(self, encoder: PatchEncoder) -> Uses:
        return Uses(**{"passes": {"student": Pass(joins=True)}, **self.declared})

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        return nn.Identity()


class Another(Reads):
    """A second one."""


def reads(kind: type[Reads] = Reads, **declared: Any) -> Reads:
    return kind(declared=declared)


def laid(*methods: PretrainAlgorithm, views: Any = None, **encoder: Any) -> Layout:
    """Return the layout of these methods; without weights."""
    with torch.device("meta"):
        return compose(methods, tiny_model(**encoder).encoder, views or {"view": GROUPS["view"]})


@pytest.mark.parametrize(
    ("host", "visible", "count"),
    [("supervised", None, 64), ("mae", "view/visible", 16), ("ijepa", "view/visible", 16)],
)
def test_a_method_that_joins_a_host_gets_its_patches(
    host: str, visible: str | None, count: int
) -> None:
    case = Case((host,))
    model = PretrainModel(case.encoder_of(), [reads(), *case.algorithms()], views=case.views)
    joined = model.layout.passes["student"]
    assert (joined.visible, joined.count, joined.readers) == (visible, count, (host, "Reads"))
    batch = written(model, case.batch(2))
    outputs = model(batch)
    prefix = model.encoder.num_prefix_tokens
    assert outputs["Reads"]["tokens"].shape[1] == prefix + count
    assert model.loss(outputs, batch)["Reads"].requires_grad


def test_a_pass_gives_patches_only_if_they_are_read() -> None:
    supervised = made("supervised")
    assert not laid(supervised).passes["student"].needs_patches
    model = tiny_model(supervised)
    images = torch.randn(4, 1, 3, 32, 32)
    assert model.run_pass("student", images, {}).shape[1] == 1
    assert laid(reads(), supervised).passes["student"].needs_patches
    model = tiny_model(reads(), supervised)
    assert model.run_pass("student", images, {}).shape[1] == 1 + 16


def test_a_pass_over_the_same_patches_is_shared_and_one_over_others_refused() -> None:
    shared = {"student": Pass(over="seen")}
    assert laid(made("mae"), reads(passes=shared)).passes["student"].readers == ("mae", "Reads")
    with pytest.raises(
        UserError,
        match=r"mae encodes the patches of 'view/visible' alone, but Reads every patch of 'view', "
        r"and both read the pass 'student'\. Use one of them, or change the host's",
    ):
        laid(reads(passes={"student": Pass()}), made("mae"))


EDITS = {"student": Pass(joins=True, edits_places=True)}
REFUSED: list[tuple[list[PretrainAlgorithm], dict[str, Any], str]] = [
    ([reads(passes={}), made("mae")], {}, r"Reads has a loss, but reads no pass .*passes=\{"),
    ([reads(passes={"global": Pass(joins=True)}), made("mae")], {},
     r"Reads joins the encoder pass 'global', which no method listed runs; there is 'student'"),
    ([reads(passes=EDITS, predicts="content"), made("supervised")], {"positions": "none"},
     r"Reads changes the places .* encoder\.positions = none has none to change"),
    (
        [
            reads(passes=EDITS, predicts="content"),
            reads(Another, passes=EDITS, predicts="content"),
            made("supervised"),
        ],
        {"positions": "relative"},
        r"Another and Reads both change the places of the encoder pass 'student'",
    ),
    ([reads(passes=EDITS), made("supervised")], {}, r"Reads changes the places .* must say what"),
    ([reads(predicts="view_place"), made("mae")], {},
     r"Reads declares predicts = 'view_place'.*mean 'view_places'"),
    ([reads(predicts="places"), made("mae")], {},
     r"Reads predicts the places of patches, .* Set encoder\.positions: none"),
    ([reads(predicts="view_places"), made("mae"), made("crop_field", field_size=None)], {},
     r"Reads declares predicts='view_places', but crop_field gives .* or hide those"),
    ([reads(keys={"*/field_box": None}), made("crop_field", field_size=None), made("mae")], {},
     r"Reads and crop_field both write the batch key 'view/field_box'"),
    ([reads(predicts="places"), reads(Another, keys={"view/field_box": None}), made("mae")], {},
     r"Reads declares predicts='places', but Another gives"),
    ([made("lut", symmetric=True), made("mae", second_mask_ratio=0.5)],
     {"views": {name: GROUPS[name] for name in ("view", "second")}},
     r"but mae masks some of the first one's. Set mae\.second_mask_ratio to 0"),
    (
        [
            made("lut", supervision="tokens"),
            made("crop_field", field_size=None, flip_field="mirror_shared"),
            made("mae"),
        ],
        {"views": {name: GROUPS[name] for name in ("view", "second")}},
        r"crop_field and lut both write the batch key 'second/flip'",
    ),
    ([made("mae"), made("simmim")], {}, r"mae and simmim both hide patches of 'view'. Use one"),
    ([made("mae"), made("mae")], {}, r"algorithms.mae is given twice; give it once"),
    ([made("ema_teacher")], {}, r"none of those listed \(ema_teacher\) has a loss"),
    ([reads(hides=Hides(4)), made("mae")], {}, r"Reads and mae both hide patches"),
    ([reads(passes={"student": Pass(), "extra": Pass("global")})], {},
     r"Reads needs the view group 'global', but data.views has view"),
    ([made("stop")], {},
     r"algorithms.stop needs algorithms.ijepa. Its predictor projects the context"),
    ([made("mae")], {"views": {"view": ViewGroup(size=64)}},
     r"data\.views\.view\.size = \[64, 64\]"),
    ([made("mae")], {"views": {"view": GROUPS["view"], "extra": ViewGroup(name="extra", size=32)}},
     r"data\.views\.extra is not read by any algorithm listed; only view is"),
]  # fmt: skip


@pytest.mark.parametrize(("methods", "options", "said"), REFUSED)
def test_what_cannot_be_is_refused_in_every_order(
    methods: list[PretrainAlgorithm], options: dict[str, Any], said: str
) -> None:
    for order in permutations(methods):
        with pytest.raises(UserError, match=said):
            laid(*order, **options)


def test_keys_have_one_writer_and_captions() -> None:
    layout = laid(made("droppos"), made("mae"))
    assert layout.writers["view/visible"] == "mae" and layout.writers["droppos/known"] == "droppos"
    assert layout.captions == {
        "view/hidden": "hidden from the encoder",
        "droppos/known": "keep their position",
    }
    assert layout.passes["affinity"] == EncoderPass(grad=False, readers=("droppos",))


def test_declared_masks_are_drawn_by_the_method_that_hides() -> None:
    masking = PatchMasking((4, 4), 4, "uniform", in_rows=True)
    own = reads(hides=Hides.by(masking, unless_host=True), passes={"student": Pass(over="seen")})
    batch = Case(("supervised",)).batch()
    model = tiny_model(own)
    assert model.layout.hides is not None and not model.layout.hides.shuffled
    drawn, alone = model.draw(dict(batch)), masking.draw(batch, model.seed)
    assert all(torch.equal(drawn[key], alone[key]) for key in ("view/visible", "view/hidden"))
    beside = tiny_model(own, made("mae", sampling="random"))
    assert not torch.equal(beside.draw(dict(batch))["view/visible"], alone["view/visible"])


def test_what_couples_the_samples_is_said_of_each_method() -> None:
    coupled = {"the targets": True, "the masks": False, "the norms": True}
    layout = laid(reads(couples=coupled), made("supervised"))
    assert layout.coupled == "the targets and the norms of Reads"
    assert not laid(reads(couples={"the masks": False}), made("supervised")).coupled


def test_a_derived_class_is_extended_and_has_its_own_name() -> None:
    kind = type("Own", (algorithm_class("ijepa"),), {})
    options = {"predictor_dim": 32, "predictor_depth": 1, "predictor_heads": 2}
    model = tiny_model(made("stop"), kind(**options))
    assert list(model.objectives) == ["Own"] and "stop/masked" in model.layout.writers
    assert model.teachers.owner == "Own"


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
    assert refused is not None and "rows_apart every patch of 'view'" in refused


def test_a_file_without_an_algorithm_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from pospre.model.algorithm import PretrainAlgorithm\n"
    unfinished = code + "class Base(PretrainAlgorithm): pass\n"
    whole = "class Whole(Base):\n    def uses(self, encoder): ...\n"
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    for name, text in (("sketch_1", code), ("sketch_2", unfinished)):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(UserError, match=rf"{name}\.py defines no PretrainAlgorithm with"):
            algorithm_class(name)
    (tmp_path / "sketch_3.py").write_text(unfinished + whole)
    assert algorithm_class("sketch_3").__name__ == "Whole"  # not the base before it
    with pytest.raises(UserError, match=r"unknown key 'sketch_3\.pairs'\. Known: none\."):
        check_arguments("sketch_3", algorithm_class("sketch_3"), {"pairs": 1}, source="algorithms")
