"""Every host with every algorithm, the table that says so, and all sets in every order."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.model.algorithm import algorithm_names
from pospre.model.compose import compose
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.nn.encoder_interface import PatchEncoder
from tests.algorithms.cases import Case, views_of, written
from tests.algorithms.composition import Outcome, outcomes, refusal_of, table, written_table

PAIRS = [
    "crop_field+diet",
    "crop_field+dinov2",
    "crop_field+droppos",
    "crop_field+ijepa",
    "crop_field+lejepa",
    "crop_field+mae",
    "crop_field+mp3",
    "crop_field+part",
    "crop_field+simmim",
    "crop_field+supervised",
    "diet+dinov2",
    "diet+droppos",
    "diet+ema_teacher",
    "diet+ijepa",
    "diet+lejepa",
    "diet+loca",
    "diet+mae",
    "diet+part",
    "diet+simmim",
    "diet+sp",
    "diet+supervised",
    "dinov2+droppos",
    "dinov2+mae",
    "dinov2+masked_position",
    "dinov2+mp3",
    "dinov2+part",
    "dinov2+simmim",
    "dinov2+sp",
    "dinov2+supervised",
    "droppos+ema_teacher",
    "droppos+ijepa",
    "droppos+lejepa",
    "droppos+loca",
    "droppos+lut",
    "droppos+mae",
    "droppos+part",
    "droppos+sp",
    "ema_teacher+lejepa",
    "ema_teacher+loca",
    "ema_teacher+mae",
    "ema_teacher+mp3",
    "ema_teacher+part",
    "ema_teacher+simmim",
    "ema_teacher+sp",
    "ema_teacher+supervised",
    "ijepa+lejepa",
    "ijepa+loca",
    "ijepa+lut",
    "ijepa+part",
    "ijepa+sp",
    "ijepa+stop",
    "lejepa+loca",
    "lejepa+mae",
    "lejepa+mp3",
    "lejepa+part",
    "lejepa+simmim",
    "lejepa+sp",
    "lejepa+supervised",
    "loca+mae",
    "loca+mp3",
    "loca+part",
    "loca+simmim",
    "loca+sp",
    "loca+supervised",
    "lut+mae",
    "lut+simmim",
    "mae+part",
    "mae+sp",
    "mp3+part",
    "mp3+sp",
    "part+simmim",
    "part+sp",
    "part+supervised",
    "simmim+sp",
    "simmim+supervised",
    "sp+supervised",
]
"""All pairs that are accepted, of 190, with their default options."""
NUM_TRIPLES = 224
"""The number of accepted triples, of 1140."""

TRIPLES = [
    ("dinov2", "crop_field", "masked_position"),
    ("mae", "droppos", "lut"),
    ("ijepa", "stop", "crop_field"),
    ("supervised", "ema_teacher", "crop_field"),
]


RELATIVE = [
    Case(names, encoder={"positions": positions})
    for names, positions in (
        (("mae",), "relative"),
        (("mae", "droppos"), "shared_relative"),
        (("droppos", "lut"), "relative"),
    )
]
"""Encoders that know offsets between cells, of which a pass leaves some out, or forgets them."""

SMOOTHED_MP3 = Case(("mp3",), options={"mp3": {"sigma_start": 1.0, "temperature": 0.1}})
"""MP3 with DropPos's smoothing and attentive weights."""

ONE_TEACHER = Case(
    ("droppos", "lut"), options={"droppos": {"affinity": "teacher"}, "lut": {"symmetric": True}}
)
"""droppos weighs by the affinities of the teacher's pass that gives lut its targets."""

Found = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def found() -> Found:
    return outcomes()


def test_the_table_in_the_readme_is_what_happens(found: Found) -> None:
    assert written_table() == table(found)


@cache
def encoder_of(positions: str | None) -> PatchEncoder:
    with torch.device("meta"):
        return Case((), encoder={} if positions is None else {"positions": positions}).encoder_of()


def layouts_of(orders: Sequence[tuple[str, ...]]) -> Iterator[Layout | str]:
    """Yield the layout of methods in each of some orders, or why there is none."""
    case = Case(orders[0])
    encoder = encoder_of(case.needed.get("positions"))
    methods = dict(zip(case.names, case.algorithms(), strict=True))
    views = views_of([*methods.values()], encoder)
    for order in orders:
        try:
            yield compose([methods[name] for name in order], encoder, views)
        except UserError as error:
            yield str(error)


def test_the_order_of_a_list_decides_nothing() -> None:
    accepted: dict[int, list[str]] = {2: [], 3: []}
    for size, found in accepted.items():
        for names in combinations(algorithm_names(), size):
            orders = [*permutations(names)] if size == 2 else [names, names[::-1]]
            first, *others = layouts_of(orders)
            for other in others:
                if isinstance(first, str) or isinstance(other, str):
                    assert first == other
                else:
                    assert list(first.methods) == list(other.methods), names
                    assert first.passes == other.passes and first.teacher == other.teacher
            if not isinstance(first, str):
                found.append("+".join(names))
    assert accepted[2] == PAIRS and len(accepted[3]) == NUM_TRIPLES


@pytest.mark.parametrize(
    "names", [("crop_field", "lut", "mae"), ("masked_position", "dinov2"), ("stop", "ijepa")]
)
def test_losses_and_heads_are_the_same_in_every_order(names: tuple[str, ...]) -> None:
    first, *others = (Case(order).build() for order in permutations(names))
    for other in others:
        assert [*other.state_dict()] == [*first.state_dict()]
        for key, value in first.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key
    first_loss, other_loss = (_losses(each, Case(names)) for each in (first, others[-1]))
    assert all(torch.equal(other_loss[key], value) for key, value in first_loss.items())


def _losses(model: PretrainModel, case: Case) -> dict[str, Tensor]:
    inputs = written(model, case.batch())
    return model.loss(model(inputs), inputs)


@pytest.mark.parametrize("names", TRIPLES, ids="+".join)
def test_three_together_work(names: tuple[str, ...]) -> None:
    assert refusal_of(Case(names)) is None


@pytest.mark.parametrize("case", RELATIVE, ids=lambda case: case.title)
def test_relative_positions_work_where_patches_are_left_out(case: Case) -> None:
    assert refusal_of(case) is None


@pytest.mark.parametrize("case", [SMOOTHED_MP3, ONE_TEACHER], ids=lambda case: case.title)
def test_the_promised_options_work(case: Case) -> None:
    assert refusal_of(case) is None


def test_every_refusal_says_what_would_work(found: Found) -> None:
    for names, (reason, _) in found.items():
        assert reason is None or len(reason) > 30, Case(names).title
