"""DropPos: goldens and invariants of the spec (section 8)."""

import math

import pytest
import torch

from pospre.algorithms.droppos import DropPos, smoothed_labels
from pospre.algorithms.mae import MAE
from pospre.evaluation.position.predictions import WEIGHT, Placer, weighed
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass, ExchangedPlaces
from pospre.model.progress import Progress
from pospre.nn.build import build_encoder
from pospre.nn.grid import grid_distances
from pospre.nn.places import Places
from pospre.nn.positions.table import Table
from tests.algorithms.cases import random_views
from tests.algorithms.dropped import draw_known
from tests.algorithms.official import DECODER, load_weights, small_model


def smooth(side, sigma, **options):
    squared = options.pop("squared", True)
    return smoothed_labels(
        grid_distances(side, side, squared=squared), torch.tensor(sigma), **options
    )


def model_and_batch(**options):
    torch.manual_seed(0)
    model = small_model(DropPos(**{"mask_ratio": 0.5, **DECODER, **options}))
    load_weights(model, position_task=True)
    return model, model.draw(random_views(side=48))


def places_of(model, inputs):
    """Return the places that the encoder gets of the visible patches."""
    return model.pass_places(model.layout.passes["student"], inputs, inputs["view/visible"])


@pytest.mark.parametrize(
    ("visible", "dropped"),
    [
        (196, (49, 98, 147, 187)),
        (147, (37, 74, 111, 140)),
        (98, (25, 49, 74, 94)),
        (49, (13, 25, 37, 47)),
    ],
)
def test_position_grid_counts(visible, dropped):
    made = [DropPos(position_mask_ratio=ratio) for ratio in (0.25, 0.5, 0.75, 0.95)]
    counts = [visible - each.num_known(visible) for each in made]
    assert counts == list(dropped)


def test_smoothed_rows_have_the_golden_values():
    labels = smooth(14, 1.0)
    inner, corner = labels[7 * 14 + 7], labels[0]
    torch.testing.assert_close(labels.sum(1), torch.ones(196))
    for value, golden in (
        (inner[7 * 14 + 7], 0.318244),
        (inner[7 * 14 + 8], 0.117075),
        (inner[8 * 14 + 8], 0.043070),
        (corner[0], 0.520324),
        (corner[1], 0.191417),
        (corner[15], 0.070418),
    ):
        assert value.item() == pytest.approx(golden, abs=2e-6)
    entropy = -(labels.double() * labels.double().log()).nan_to_num().sum(1)
    assert entropy[7 * 14 + 7].item() == pytest.approx(2.142895, abs=1e-5)
    assert entropy[0].item() == pytest.approx(1.291331, abs=1e-5)
    assert entropy.mean().item() == pytest.approx(2.007451, abs=1e-5)


def test_euclidean_distance_has_its_golden_value():
    assert smooth(14, 1.0, squared=False)[7 * 14 + 7, 7 * 14 + 7].item() == pytest.approx(
        0.15435, abs=1e-4
    )


def test_official_labels_sum_to_one_over_columns_only():
    official = smooth(14, 1.0, official=True)
    mass = official.sum(1)
    assert official[0, 1].item() == pytest.approx(0.151274, abs=1e-6)
    assert official[1, 0].item() == pytest.approx(0.191417, abs=1e-6)
    for position, golden in ((0, 0.88633), (15, 1.10960), (7, 0.94145), (7 * 14 + 7, 1.0)):
        assert mass[position].item() == pytest.approx(golden, abs=1e-4)
    small = smooth(4, 1.0, official=True).sum(1)
    for position, golden in ((0, 0.8866), (1, 0.9966), (5, 1.1202)):
        assert small[position].item() == pytest.approx(golden, abs=1e-4)


@pytest.mark.parametrize("sigma", [0.0, 1 / 800])
def test_vanishing_width_is_exactly_one_hot(sigma):
    assert torch.equal(smooth(14, sigma), torch.eye(196))


def test_zero_logits_cost_the_log_of_the_number_of_positions():
    model, inputs = model_and_batch()
    outputs = model(inputs)
    outputs["droppos"]["logits"] = torch.zeros_like(outputs["droppos"]["logits"])
    assert float(model.loss(outputs, inputs)["total"].detach()) == pytest.approx(math.log(36), 1e-5)


def test_official_zero_logits_cost_the_row_mass_of_the_dropped_positions_more():
    model, inputs = model_and_batch(official=True, temperature=None, sigma_start=2.0)
    outputs = model(inputs)
    outputs["droppos"]["logits"] = torch.zeros_like(outputs["droppos"]["logits"])
    mass = smooth(6, 2.0, official=True).sum(1)[inputs["view/visible"]][~inputs["droppos/known"]]
    expected = math.log(36) * float(mass.mean())
    assert float(model.loss(outputs, inputs)["total"].detach()) == pytest.approx(expected, 1e-5)
    assert expected != pytest.approx(math.log(36), 1e-4)


def test_without_relaxations_the_loss_is_plain_cross_entropy_on_dropped_patches():
    model, inputs = model_and_batch(temperature=None, sigma_start=0.0)
    outputs = model(inputs)
    logits, dropped = outputs["droppos"]["logits"], ~inputs["droppos/known"]
    expected = torch.nn.functional.cross_entropy(logits[dropped], inputs["view/visible"][dropped])
    torch.testing.assert_close(model.loss(outputs, inputs)["total"], expected)


@pytest.mark.parametrize(("affinity", "sees_removed"), [("full", True), ("visible", False)])
def test_removed_patches_reach_only_the_full_affinity(affinity, sees_removed):
    model, inputs = model_and_batch(affinity=affinity)
    before = model(inputs)["droppos"]
    images = inputs["view/image"].clone()
    for sample, patch in enumerate(inputs["view/hidden"][:, 0].tolist()):
        row, col = 8 * (patch // 6), 8 * (patch % 6)
        images[sample, 0, :, row : row + 8, col : col + 8] ^= 255
    after = model(inputs | {"view/image": images})["droppos"]
    assert torch.equal(after["logits"], before["logits"])
    assert torch.equal(after["affinity"], before["affinity"]) is not sees_removed


def test_permuting_slots_permutes_logits():
    """The published ``shuffle`` switch is therefore a no-op, and not offered."""
    model, inputs = model_and_batch()
    model.double()
    outputs = model(inputs)["droppos"]["logits"]
    order = torch.randperm(18)
    shuffled = inputs | {key: inputs[key][:, order] for key in ("view/visible", "droppos/known")}
    torch.testing.assert_close(model(shuffled)["droppos"]["logits"], outputs[:, order])


def test_wrong_positions_are_the_dropped_ones_in_random_order():
    model, inputs = model_and_batch(position_token="wrong")
    true, dropped = inputs["view/visible"], ~inputs["droppos/known"]
    places = places_of(model, inputs)
    assert places.cells is not None and places.known is None
    seen = places.cells
    assert torch.equal(seen[~dropped], true[~dropped])
    assert (seen[dropped] != true[dropped]).any()
    for sample in range(4):
        assert sorted(seen[sample][dropped[sample]]) == sorted(true[sample][dropped[sample]])


def test_wrong_positions_are_distributed_as_published():
    """A uniform permutation of the dropped: each gets each alike, so one is right on average."""
    num, visible = 4000, 8
    batch = {"index": torch.arange(num), "epoch": torch.zeros(num, dtype=torch.int64)}
    slots = torch.arange(visible).expand(num, -1)
    batch["view/visible"] = slots
    draw_known(batch, 0.5, seed=0)
    seen = ExchangedPlaces("droppos/known", "droppos/order")(
        Places((1, visible), slots), batch, EncoderPass(visible="view/visible")
    ).cells
    assert seen is not None
    dropped = ~batch["droppos/known"]
    right = (seen == slots) & dropped
    assert float(right.sum(1).float().mean()) == pytest.approx(1, abs=4 / num**0.5)
    given = torch.zeros(visible, visible).index_put_(
        (torch.arange(visible).expand(num, -1)[dropped], seen[dropped]), torch.tensor(1.0), True
    )
    # a slot is dropped in half of the draws; it keeps its own place in a quarter of those, and gets
    # another's, dropped in 3 of 7, equally often
    expected = torch.full((visible, visible), num / 2 * 3 / 4 / 7)
    expected.fill_diagonal_(num / 2 / 4)
    assert float((given - expected).abs().max()) < 5 * (num / 2 / 4) ** 0.5


def test_sigma_decays_per_step_and_officially_per_epoch():
    model, _ = model_and_batch()
    objective = model.objectives["droppos"]
    halfway = Progress(step=0.5, epoch=0.4)
    DropPos(sigma_start=2.0, sigma_end=1.0).schedule(model, halfway)
    assert objective.sigma.item() == pytest.approx(1.5)
    DropPos(sigma_start=2.0, official=True).schedule(model, halfway)
    assert objective.sigma.item() == pytest.approx(1.2)


def test_accuracy_is_unweighted_over_dropped_patches():
    model, inputs = model_and_batch()
    outputs = model(inputs)
    keep, dropped = inputs["view/visible"], ~inputs["droppos/known"]
    logits = torch.nn.functional.one_hot(keep, 36).float()
    logits[0] = -logits[0]  # the first sample is all wrong
    outputs["droppos"]["logits"] = logits
    measured = model.loss(outputs, inputs)["metric/droppos_accuracy"]
    assert measured == dropped[1:].sum() / dropped.sum()


def test_beside_mae_one_pass_serves_both():
    model = small_model(DropPos(weight=0.05, **DECODER), MAE(mask_ratio=0.5, **DECODER))
    inputs = model.draw(random_views(side=48))
    terms = model.loss(model(inputs), inputs)
    torch.testing.assert_close(terms["total"], terms["mae"] + 0.05 * terms["droppos"])
    assert set(model.layout.passes) == {"student", "affinity"}


def test_prediction_at_other_ratios_draws_the_training_masks():
    model, inputs = model_and_batch(position_mask_ratio=0.5)
    place = Placer(model, seed=0)
    logits, keep, dropped, _ = place(random_views(side=48), 0.5, 0.5)
    assert torch.equal(keep, inputs["view/visible"])
    assert torch.equal(dropped, ~inputs["droppos/known"])
    torch.testing.assert_close(logits, model(inputs)["droppos"]["logits"].detach())
    other = place(inputs, 0.0, 0.95)
    assert other[0].shape == (4, 36, 36) and other[2].sum(1).tolist() == [35] * 4


def test_weights_of_an_evaluation_are_those_of_the_loss():
    model, inputs = model_and_batch()
    weights, keep = weighed(model, random_views(side=48))[WEIGHT], inputs["view/visible"]
    visible = weights.gather(1, keep)
    torch.testing.assert_close(
        visible / visible.sum(1, keepdim=True), model(inputs)["droppos"]["affinity"].detach()
    )
    assert WEIGHT not in weighed(model_and_batch(temperature=None)[0], random_views(side=48))


def test_without_masking_full_and_visible_affinity_are_one():
    full, inputs = model_and_batch(mask_ratio=0.0)
    visible, _ = model_and_batch(mask_ratio=0.0, affinity="visible")
    torch.testing.assert_close(
        full(inputs)["droppos"]["affinity"], visible(inputs)["droppos"]["affinity"]
    )


def test_a_learned_table_learns_from_the_shown_positions():
    encoder = build_encoder("vit_tiny16", image_size=48, patch_size=8, depth=1, positions="learned")
    model = PretrainModel(encoder, [DropPos(temperature=None, mask_ratio=0.0, **DECODER)])
    inputs = model.draw(random_views(side=48))
    model.loss(model(inputs), inputs)["total"].backward()
    assert isinstance(encoder.positions, Table) and encoder.positions.pos_embed.grad is not None
    learned = encoder.positions.pos_embed.grad[0, 1:].abs().sum(-1) > 0
    shown = inputs["view/visible"][inputs["droppos/known"]].unique()
    assert sorted(learned.nonzero().flatten().tolist()) == shown.tolist()
