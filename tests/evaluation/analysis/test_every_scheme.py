"""Evaluations of positions and of attention measure every scheme, and leave out what it lacks."""

import math
from typing import Any

import pytest

from pospre.evaluation.registry import figures_of
from pospre.nn.positions import scheme_class
from tests.evaluation.analysis.small import Analyse, small_recipe
from tests.evaluation.schemes import SCHEME_NAMES

CLASSIFIER = {"supervised": {"num_classes": 2}}
PROBE = {"num_samples": 12, "iterations": 2}
EVALUATIONS: dict[str, dict[str, Any]] = {
    "position_probe": {**PROBE, "layers": "0,2"},
    "attention": {},
}
OF_FORGOTTEN = {"masked_top1", "content_top1", "content_r2"}


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_every_scheme_is_measured(analyse: Analyse, name: str, scheme: str) -> None:
    recipe = small_recipe(CLASSIFIER, positions=scheme)
    results = analyse(name, recipe, num_images=12, folder=False, **EVALUATIONS[name])
    figures = figures_of(name)
    missing = {figure for figure in figures if results[figure] is None}
    assert missing == (set() if scheme_class(scheme).can_forget else OF_FORGOTTEN & {*figures})
    assert all(math.isfinite(results[figure]) for figure in figures if figure not in missing)
