"""Every algorithm over schemes of positions that are not added: each pair trains, or says why not.

Each algorithm and each scheme stands in the covering set at least twice. The whole table is printed
by ``python -m tests.algorithms.test_schemes``.
"""

import sys
from typing import Any

import pytest
import torch

from pospre.errors import UserError
from pospre.nn.positions import SCHEMES
from pospre.output import markdown_table
from tests.algorithms.cases import Case, make_optimizer, train, train_and_resume, written

TOGETHER = {
    "mae": ("mae",),
    "simmim": ("simmim",),
    "ijepa": ("ijepa",),
    "dinov2": ("dinov2",),
    "lejepa": ("lejepa",),
    "supervised": ("supervised",),
    "droppos": ("mae", "droppos"),
    "mp3": ("mp3",),
    "part": ("mae", "part"),
    "stop": ("ijepa", "stop"),
    "lut": ("mae", "lut"),
    "crop_field": ("dinov2", "crop_field"),
    "masked_position": ("dinov2", "crop_field", "masked_position"),
    "ema_teacher": ("mae", "ema_teacher"),
    "loca": ("loca",),
    "sp": ("sp",),
}
ROTARY = {"rotary": {"shift": 0.1, "jitter": 1.2, "rescale": 2.0}}
COVERING: list[tuple[str, Any]] = [
    ("mae", ROTARY),
    ("mae", "alibi"),
    ("simmim", "rotary_mixed"),
    ("simmim", "learned_rotary"),
    ("simmim", "shared_relative"),
    ("ijepa", ROTARY),
    ("ijepa", "rotary_mixed"),
    ("dinov2", ROTARY),
    ("dinov2", "torus"),
    ("lejepa", "none"),
    ("lejepa", ROTARY),
    ("supervised", "relative"),
    ("supervised", "lookhere"),
    ("droppos", "lookhere"),
    ("droppos", "relative"),
    ("mp3", "rotary"),
    ("mp3", "relative"),
    ("mp3", "learned"),
    ("part", "rotary"),
    ("part", "relative"),
    ("stop", "shared_relative"),
    ("stop", "learned_sincos"),
    ("lut", "rotary"),
    ("lut", "alibi"),
    ("crop_field", "rotary"),
    ("crop_field", "rotary_mixed"),
    ("masked_position", "rotary"),
    ("masked_position", {"alibi": {"slopes": "learned"}}),
    ("ema_teacher", "learned_rotary"),
    ("ema_teacher", "learned_sincos"),
    ("loca", "none"),
    ("loca", "learned"),
    ("sp", "none"),
    ("sp", "alibi"),
]
ONE_GRAPH: list[tuple[str, Any]] = [("supervised", "relative"), ("mp3", "rotary")]
"""Of which a pass asks for the class token alone, or has a context."""
REFUSED = [
    ("stop", "rotary", "tells it exactly"),
    ("crop_field", "relative", "supports only the grid"),
    ("crop_field", "none", "supports no places"),
    ("crop_field", ROTARY, "Leave it out"),
    ("masked_position", "shared_relative", "supports only the grid"),
    ("droppos", "none", "has none to change"),
    ("simmim", "none", "all would be predicted alike"),
    ("dinov2", "relative", "supports only the grid"),
    ("loca", "relative", "supports only the grid"),
    ("sp", "relative", "supports only the grid"),
    ("lejepa", "shared_relative", "supports only the grid"),
]


def case_of(name: str, scheme: Any) -> Case:
    options: dict[str, dict[str, Any]] = {}
    if not str(scheme).startswith("learned") and "crop_field" in TOGETHER[name]:
        options["crop_field"] = {"field_size": None}
    if name == "mp3" and scheme != "none":
        options["mp3"] = {"position_rate": 0.25}
    return Case(TOGETHER[name], options, {"positions": scheme})


def title(name: str, scheme: Any) -> str:
    return f"{name}-{scheme if isinstance(scheme, str) else '-'.join(scheme)}"


@pytest.mark.parametrize(("name", "scheme"), ONE_GRAPH, ids=[title(*each) for each in ONE_GRAPH])
def test_a_pair_compiles_into_one_graph(name: str, scheme: Any, whole_graph: Any) -> None:
    case = case_of(name, scheme)
    model = case.build()
    twin = case.build()
    inputs = written(model, case.batch())
    eager = model.loss(model(inputs), inputs)["total"]
    written(twin, case.batch())
    compiled = whole_graph(twin)(inputs)
    torch.testing.assert_close(twin.loss(compiled, inputs)["total"], eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "scheme"), COVERING, ids=[title(*each) for each in COVERING])
def test_a_pair_trains_and_resumes(name: str, scheme: Any) -> None:
    case = case_of(name, scheme)
    model, losses = train_and_resume(case.build, case.batch(), saved_after=2, steps=3)
    assert torch.tensor(losses).isfinite().all()
    trained = [each for each in model.named_parameters() if each[1].requires_grad]
    assert [key for key, value in trained if value.grad is None] == []


@pytest.mark.parametrize(("name", "scheme", "words"), REFUSED)
def test_a_pair_that_cannot_be_is_refused_with_the_reason(
    name: str, scheme: Any, words: str
) -> None:
    case = case_of(name, scheme)
    with pytest.raises(UserError, match=words):
        model = case.build()
        written(model, case.batch())
        model(written(model, case.batch()))


def table() -> str:
    """Return a row for each algorithm: under which schemes it trains."""
    rows = []
    for name in TOGETHER:
        cells = [name]
        for scheme in SCHEMES:
            case = case_of(name, scheme)
            try:
                model = case.build()
                train(model, make_optimizer(model), case.batch(), range(2))
                cells.append("yes")
            except UserError:
                cells.append("refused")
        rows.append(cells)
    return markdown_table(["", *SCHEMES], rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
