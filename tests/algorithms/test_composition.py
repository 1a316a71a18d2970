"""Every host with every algorithm, and the table that says so."""

import pytest

from tests.algorithms.cases import Case
from tests.algorithms.composition import Outcome, outcomes, refusal_of, table, written_table

WORKING = [
    ("mae", "droppos"),
    ("mae", "lut"),
    ("simmim", "lut"),
    ("droppos", "lut"),
    ("ijepa", "stop"),
    ("dinov2", "crop_field"),
    ("ijepa", "crop_field"),
    ("mae", "crop_field"),
    ("droppos", "crop_field"),
    ("dinov2", "masked_position"),
]

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
    ("droppos", "lut"),
    options={"droppos": {"affinity": "teacher"}, "lut": {"symmetric": True}},
)
"""droppos weighs by the affinities of the teacher's pass that gives lut its targets."""

Found = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def found() -> Found:
    return outcomes()


def test_the_table_in_the_readme_is_what_happens(found: Found) -> None:
    assert written_table() == table(found)


def test_the_promised_pairs_work(found: Found) -> None:
    assert {names: found[names].refusal for names in WORKING} == dict.fromkeys(WORKING)


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
