"""Reconstructions: the error is that of the training's own pass, and what is painted is exact."""

import pytest
import torch

from pospre.evaluation.analysis.reconstructions import alone, hide, painted
from tests.algorithms.cases import Case
from tests.evaluation.analysis.small import Analyse, small_recipe


@pytest.mark.parametrize("names", [("mae",), ("simmim",), ("mae", "crop_field")])
def test_predictions_are_those_of_the_training_pass(names: tuple[str, ...]) -> None:
    case = Case(names, encoder={"positions": "learned"})
    model = case.build()
    host = alone(model.eval())
    batch = hide(host, case.batch(3), 0.75, 0)
    found = host.outputs(batch)
    expected = model(batch)[names[0]]
    for key in ("predicted", "target"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-6)
    assert found["predicted"].shape == (3, 48, 48)


def test_what_others_add_to_the_pass_is_left_out() -> None:
    case = Case(("mae", "droppos"))
    model = case.build()
    host = alone(model.eval())
    batch = hide(host, case.batch(3), 0.75, 0)
    model.layout.methods["droppos"].write(batch, model)
    everything = {**batch, "droppos/known": torch.ones_like(batch["droppos/known"])}
    expected = model(everything)["mae"]["predicted"]
    torch.testing.assert_close(host.outputs(batch)["predicted"], expected, rtol=1e-5, atol=1e-6)


def test_visible_patches_are_not_masked_a_second_time() -> None:
    case = Case(("mae",), options={"mae": {"second_mask_ratio": 0.25}})
    host = alone(case.build().eval())
    batch = hide(host, case.batch(3), 0.5, 0)
    assert host.outputs(batch)["predicted"].shape == (3, 32, 48)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_true_pixels_paint_the_image_itself(norm_pix: bool) -> None:
    case = Case(("mae",), options={"mae": {"norm_pix": norm_pix}})
    model = case.build()
    host = alone(model.eval())
    batch = hide(host, case.batch(2), 0.5, 0)
    batch["view/flip"][:] = False
    outputs = host.outputs(batch)
    visible, whole = painted(model, batch, {**outputs, "predicted": outputs["target"]})
    images = batch["view/image"][:, 0]
    assert (whole.int() - images.int()).abs().max() <= 1  # of norm_pix: its 1e-6 under the root
    hidden = batch["view/masked"].unflatten(1, (8, 8))
    hidden = hidden.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None].expand_as(images)
    assert torch.equal(visible[~hidden], images[~hidden])


def test_evaluation_draws_and_measures(analyse: Analyse) -> None:
    recipe = small_recipe()
    found = analyse("reconstructions", recipe, num_pictures=2)
    again = analyse("reconstructions", recipe, batch_size=4, baseline=False, drawn=False)
    assert found["samples"] == 6 and found["error_se"] > 0
    assert again["error"] == pytest.approx(found["error"], rel=1e-5)
    assert found["flat_error"] == pytest.approx(1, abs=0.02)  # (n − 1)/n of n pixels
    assert found["initial_error"] > 0 and again["initial_error"] is None
