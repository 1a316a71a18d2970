"""Every host with every algorithm, and the table that says so."""

from typing import Any

import pytest

from tests.algorithms.cases import Case
from tests.algorithms.composition import outcome, pairs, table, written_table

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


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, ...], str | None]:
    return {names: outcome(names) for names in pairs()}


def test_the_table_in_the_readme_is_what_happens(
    outcomes: dict[tuple[str, ...], str | None],
) -> None:
    assert written_table() == table(outcomes)


@pytest.mark.parametrize("names", WORKING, ids="+".join)
def test_the_promised_pairs_work(
    names: tuple[str, ...], outcomes: dict[tuple[str, ...], str | None]
) -> None:
    assert outcomes[names] is None


@pytest.mark.parametrize("names", TRIPLES, ids="+".join)
def test_three_together_work(names: tuple[str, ...]) -> None:
    assert outcome(names) is None


def test_lut_and_droppos_share_one_teacher_pass() -> None:
    options: dict[str, dict[str, Any]] = {
        "droppos": {"affinity": "teacher"},
        "lut": {"symmetric": True},
    }
    model, _ = Case(("droppos", "lut"), options=options).build()
    teachers = {name: done.group for name, done in model.passes.items() if done.teacher}
    assert sorted(teachers.values()) == ["second", "view"]
    assert "affinity" not in model.passes


def test_every_refusal_says_what_would_work(
    outcomes: dict[tuple[str, ...], str | None],
) -> None:
    for names, reason in outcomes.items():
        assert reason is None or len(reason) > 30, Case(names).title
