"""Drift from the start: planted changes have known figures, and signs of trouble are told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.errors import UserError
from pospre.evaluation.analysis.drift import alarms, repositioned
from pospre.evaluation.analysis.similarity import kept
from pospre.evaluation.models import Start, moved
from pospre.evaluation.run import run_evaluation
from pospre.model.comparison import on_grid
from pospre.nn.build import build_encoder
from pospre.training.build import build_model
from tests.evaluation.analysis.small import small_recipe

FINE = {
    **{f"{name}patch_rank": 60.0 for name in ("", "start_")},
    **{f"{name}patch_norm": 1.2 for name in ("", "start_")},
    **{f"{name}patch_blur": 0.5 for name in ("", "start_")},
    **{f"{name}patch_r2": 0.6 for name in ("", "start_")},
    **{"patch_cosine": 0.9, "class_cosine": 0.9, "patch_kept": 0.8, "patch_gram": 0.02},
    **{"student_moved": 0.01, "teacher_moved": 0.005},
    "repositioned": None,
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"patch_rank": 29.0}, "features collapse: rank 29, in the start 60"),
        ({"patch_gram": 0.06}, "patches lose their relations: Gram 0.060"),
        ({"patch_cosine": 0.5}, "patches have left the start, and the class token has not: cosine"),
        ({"patch_blur": 0.65}, "patches of an image become alike: cosine up by 0.15"),
        ({"patch_norm": 2.5}, "a few patches are far longer than the others: outliers"),
        ({"patch_r2": 0.85}, r"patches tell their place more than in the start: R² up by 0.25"),
        ({"patch_kept": 0.4}, "patches have new neighbours: 40% of the start's nearest"),
        ({"class_kept": 0.3}, "images have new neighbours by their class tokens: 30% of the"),
        ({"repositioned": "alibi"}, "alibi tells places again: R² 0.60; distill.target"),
        ({"teacher_moved": 0.0}, "the teacher does not follow: the student's weights have moved"),
        ({"teacher_moved": 0.02}, "the teacher is ahead of the student: weights moved by 2.0e-02"),
    ],
)
def test_signs_of_trouble(changed: dict[str, float], said: str) -> None:
    assert alarms(FINE) == []
    (line,) = alarms({**FINE, **changed})
    assert line.startswith(said)


def test_weights_that_have_moved_from_the_start() -> None:
    recipe = small_recipe()
    start, state = build_model(recipe), build_model(recipe).state_dict()
    assert moved(state, start) == {"student": 0.0}
    state |= {f"teacher.module.{key}": 1.5 * v for key, v in start.encoder.state_dict().items()}
    state["encoder.cls_token"] = torch.ones(3)  # of another shape
    assert moved(state, start) == {"student": 0.0, "teacher": pytest.approx(0.5)}


def test_positions_that_can_tell_places_again_are_known() -> None:
    def small(positions: str, **options: Any) -> Any:
        return build_encoder("vit_tiny16", image_size=32, depth=1, positions=positions, **options)

    start = small("learned")
    for own, name in (("learned", None), ("torus", None), ("none", None), ("alibi", "alibi")):
        assert repositioned(small(own), start) == name
    fading = small("alibi", fades_from="learned")
    assert repositioned(fading, start) is None
    fading.positions.fade(0.5)
    assert repositioned(fading, start) == "alibi"


def test_neighbours() -> None:
    line = -(torch.arange(12.0)[:, None] - torch.arange(12.0)).abs()[None]
    assert kept(line, line).item() == 1
    far = line.clone()
    far[0, 0] = torch.arange(12.0)  # of one of twelve tokens, the farthest are nearest
    assert kept(far, line).item() == pytest.approx(11 / 12)


def test_a_scale_is_no_drift_and_a_shift_only_of_the_mean(
    image_folder: Callable[..., Path],
) -> None:
    recipe, data = small_recipe(), image_folder(24)
    start, shifted, scaled = (build_model(recipe).eval() for _ in range(3))
    draw = torch.Generator().manual_seed(0)
    norms: list[Any] = [each.encoder.norm for each in (shifted, scaled)]
    with torch.no_grad():
        norms[0].bias.add_(torch.randn(start.encoder.embed_dim, generator=draw))
        norms[1].weight.mul_(3)
        norms[1].bias.mul_(3)
    settings: dict[str, Any] = {"num_samples": 24, "baseline": False, "layers": (2,)}
    figures = {}
    for name, model in (("scaled", scaled), ("shifted", shifted)):
        options: dict[str, Any] = {
            "start": Start(start, "file"),
            "progress": False,
            "device": "cpu",
        }
        document = run_evaluation("drift", model, recipe, str(data), settings, **options)
        figures[name] = document["results"]
        assert document["start"] == "file" and document["start_sha256"]
    assert figures["scaled"]["patch_cosine"] == pytest.approx(1, abs=1e-6)
    assert figures["scaled"]["patch_gram"] == pytest.approx(0, abs=1e-9)
    assert figures["shifted"]["patch_cosine"] < 0.9
    assert figures["shifted"]["patch_centred"] == pytest.approx(1, abs=1e-5)
    assert figures["shifted"]["patch_cka"] == pytest.approx(1, abs=1e-5)
    with pytest.raises(UserError, match="drift: it compares with the weights that training"):
        run_evaluation("drift", shifted, recipe, str(data), settings, progress=False, device="cpu")


@torch.no_grad()
def test_a_start_with_other_patches_is_read_at_the_places_of_the_model(
    image_folder: Callable[..., Path],
) -> None:
    recipes = [small_recipe(patch_size=patch) for patch in (8, 16)]
    own, start = (build_model(each).eval() for each in recipes)
    data, seen = image_folder(24), []

    def watched(module: Any, inputs: Any, tokens: Any) -> None:
        seen.append(tokens)

    settings: dict[str, Any] = {"num_samples": 24, "baseline": False, "layers": (2,)}
    options: dict[str, Any] = {"progress": False, "device": "cpu", "start": Start(start, "file")}
    norms: list[Any] = [each.encoder.norm for each in (own, start)]
    hooks = [norm.register_forward_hook(watched) for norm in norms]
    beside, alone = (
        run_evaluation("drift", model, recipe, str(data), settings, **options)["results"]
        for model, recipe in zip((own, start), recipes, strict=True)
    )
    for hook in hooks:
        hook.remove()
    for key in ("r2", "norm", "blur", "rank"):  # of the start alone: on its own grid
        assert beside[f"start_patch_{key}"] == pytest.approx(alone[f"start_patch_{key}"])
    fine, coarse = (tokens[12:, 1:] for tokens in seen[:2])
    read = on_grid(coarse, (2, 2), (4, 4))
    expected = float(torch.cosine_similarity(fine, read, dim=-1).mean())
    assert beside["patch_cosine"] == pytest.approx(expected, abs=1e-5)
    assert alone["patch_cosine"] == 1 and beside["class_cosine"] < 0.99
    for change, words in (
        ({"depth": 1}, "the start has depth 1, width 32 and a class token, and the model depth 2"),
        ({"class_token": False}, "32 and no class token, and the model .* and a class token"),
    ):
        options["start"] = Start(build_model(small_recipe(**change)), "file")
        with pytest.raises(UserError, match=words):
            run_evaluation("drift", own, recipes[0], str(data), settings, **options)
