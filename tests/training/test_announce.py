"""Lines before the first step: whether a teacher keeps pace with its student."""

import re

import pytest

from pospre.model.teacher import Momentum
from pospre.recipe.recipe import load_recipe
from pospre.training.announce import pace


@pytest.mark.parametrize(
    ("momentum", "first", "total_steps", "said"),
    [
        (0.992, 0, 500, ""),  # 87 steps
        (0.996, 0, 500, "hardly follows in the 500 steps that train the encoder: .* is 173 steps"),
        (0.996, 0, 1000, ""),
        (0.999, 1500, 10_000, ""),
        (0.999, 0, 3000, "is 693 steps. Choose a momentum_start between 0.9861 and 0.9988"),
        (0.98, 0, 10_000, "is nearly the student in the 10000 .* between 0.9861 and 0.9997"),
        (0.98, 0, 150, ""),
        (0.0, 0, 60, "is nearly the student in the 60 .* between 0.9422 and 0.9861"),
    ],
)
def test_a_teacher_keeps_pace_or_it_is_told(
    momentum: float, first: int, total_steps: int, said: str
) -> None:
    found = pace(Momentum(momentum, shape="constant"), first, total_steps)
    assert found is None if not said else re.search(said, found or "")


@pytest.mark.parametrize(("name", "steps"), [("look", 150), ("dinov2", 10_000), ("dinov3", 10_000)])
def test_the_recipes_of_adapt_keep_pace(name: str, steps: int) -> None:
    recipe = load_recipe(f"adapt/{name}")
    given = recipe.algorithms["dinov2"]
    first = round(steps * float(recipe.stages[0].until or 0))
    assert recipe.trainer.max_duration == f"{steps}ba"
    assert pace(Momentum(given["momentum_start"]), first, steps) is None
