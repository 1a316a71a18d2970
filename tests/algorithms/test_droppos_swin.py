"""DropPos for Swin-T: it learns, places of dropped patches cannot leak, and the contract holds."""

import itertools
from typing import Any

import pytest
import torch

from pospre.evaluation.position.position_grid import MASK_RATIOS, POSITION_MASK_RATIOS, summarise
from pospre.evaluation.position.predictions import Placer, tally
from pospre.nn.encoder_interface import patchify, unpatchify
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.algorithms.cases import random_views, train_and_resume
from tests.swin_runs import DROPPOS, small_swin


def swin_recipe(**options: Any) -> Recipe:
    return small_swin("unused", "droppos", {**DROPPOS, **options}, image_size=128, window=4)


@pytest.mark.parametrize("training", [False, True])
def test_swin_classifies_positions_that_cannot_leak(training: bool) -> None:
    model = build_model(swin_recipe(position_mask_ratio=1.0)).train(training)
    inputs = model.draw(random_views(size=2, side=128, seed=4))
    assert inputs["view/visible"].shape == (2, 16)
    logits = model(inputs)["droppos"]["logits"]
    assert logits.shape == (2, 16, 64)
    # the same patches from elsewhere in the image, in the same slots, give the same logits
    moved = {**inputs, "view/visible": 63 - inputs["view/visible"]}
    patches = patchify(inputs["view/image"][:, 0], (16, 16)).flip(1)
    moved["view/image"] = unpatchify(patches, (8, 8)).unsqueeze(1)
    assert torch.equal(model(moved)["droppos"]["logits"], logits)
    model.loss(model(inputs), inputs)["total"].backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert all("offset_bias" in name for name in without)  # nothing is shown, so no offset is known


def test_swin_trains_on_shown_and_dropped_positions_and_resumes() -> None:
    recipe = swin_recipe()
    _, losses = train_and_resume(
        lambda: build_model(recipe), random_views(size=2, side=128, seed=4), saved_after=1, steps=2
    )
    assert losses[-1] < losses[0]


def test_swin_is_one_graph_with_the_same_loss_and_near_it_in_bf16(whole_graph: Any) -> None:
    recipe, inputs = swin_recipe(), random_views(size=2, side=128, seed=4)
    model: Any = build_model(recipe)
    for stage in (0, 2, 3):  # the other one keeps a shifted block; each takes time to compile
        del model.encoder.layers[stage].blocks[1:]
    model.draw(inputs)
    with torch.no_grad():  # half the time
        eager = model.loss(model(inputs), inputs)["total"]
        with torch.autocast("cpu", torch.bfloat16):
            half = model.loss(model(inputs), inputs)["total"]
        loss = model.loss(whole_graph(model)(inputs), inputs)["total"]
    torch.testing.assert_close(loss, eager, rtol=1e-4, atol=1e-5)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, eager, rtol=0.05, atol=0.05)


def test_swin_is_measured_where_the_visible_patches_fill_a_square() -> None:
    """As trained at γ = .75, one of every 2×2; before, the second ratio ended the evaluation."""
    model = build_model(swin_recipe()).eval()
    keep, place = {}, Placer(model, seed=0)

    def predict(batch: Any, mask: float | None, position_mask: float | None) -> Any:
        found = place(batch, mask, position_mask)
        keep[mask] = found.places
        return found

    ratios = [ratio for ratio in MASK_RATIOS if model.encoder.takes(round(64 * (1 - ratio)))]
    assert ratios == [0.0, 0.75]
    cells = [*itertools.product(ratios, POSITION_MASK_RATIOS)]
    results = summarise(
        tally({"": predict}, [random_views(size=2, side=128, seed=4)], cells), (8, 8)
    )
    assert len(results["cells"]) == 8
    blocks = keep[0.75] // 16 * 4 + keep[0.75] % 8 // 2
    assert all(sorted(row.tolist()) == list(range(16)) for row in blocks)
