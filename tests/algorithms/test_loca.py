"""LOCA's labels, context, clusters and loss; only pictures that tell the place teach it."""

import math
from typing import Any

import pytest
import torch

from pospre.algorithms.dinov2.losses import sinkhorn
from pospre.algorithms.loca import LOCA, PlaceInReference
from pospre.batch import Batch
from pospre.data.views.options import ViewGroup
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.position_task import ViewAnswers
from pospre.nn.build import build_encoder
from tests.algorithms.control_pictures import batch_of, train

VIEWS = {
    "view": ViewGroup(size=16, scale=(0.32, 1.0), flip_rate=0.0),
    "query": ViewGroup(name="query", size=16, scale=(0.32, 1.0), flip_rate=0.0),
    "focal": ViewGroup(name="focal", count=2, size=8, scale=(0.05, 0.32), flip_rate=0.0),
}


def model_of(
    positions: str = "sincos", views: dict[str, ViewGroup] = VIEWS, **options: Any
) -> PretrainModel:
    torch.manual_seed(0)
    encoder = build_encoder(
        "speech8", image_size=16, patch_size=4, channels=3, depth=2, positions=positions
    )
    method = LOCA(num_prototypes=32, head_hidden=32, head_bottleneck=16, **options)
    return PretrainModel(encoder, [method], seed=3, views=views)


def head_of(model: PretrainModel) -> PlaceInReference:
    head = model.objectives["loca"]
    assert isinstance(head, PlaceInReference)
    return head


@torch.no_grad()
def asked(model: PretrainModel, batch: Batch) -> tuple[ViewAnswers, Outputs]:
    outputs = model.eval()(batch)["loca"]
    return head_of(model).answers(outputs, batch), outputs


def test_queries_see_a_run_of_patches_and_each_has_its_own_labels() -> None:
    model = model_of()
    batch = model.prepare(batch_of(model.views, 0, told=True, size=64), 0.0)
    context, kept = batch["loca/context"], batch["loca/query"]
    assert context.shape == (64, 3) and (context.diff(dim=1) == 1).all()  # int(.2 · 16)
    assert {*context[:, 0].tolist()} == {*range(14)}
    assert kept.shape == (64, 1, 5)  # int(.36 · 16)
    found, outputs = asked(model, batch)
    assert outputs["logits"].shape == (64, 5 + 2 * 4, 16)
    assert found.logits.shape == (64, 16 + 2 * 4, 16)
    places = head_of(model).places(batch)
    assert torch.equal(places[:, :5], found.places[:, :16].gather(1, kept[:, 0]))
    assert torch.equal(places[:, 5:], found.places[:, 16:])
    rows = torch.arange(64)[:, None]
    assert torch.equal(outputs["logits"][:, :5], found.logits[rows, kept[:, 0]])
    assert torch.equal(outputs["logits"][:, 5:], found.logits[:, 16:])
    assert torch.equal(found.counted, (found.places >= 0) & ~found.known)
    assert int(found.counted.sum()) == int((places >= 0).sum())
    halved = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad():  # what FSDP2 with mixed_precision: DEFAULT makes of boxes
        assert torch.equal(model(halved)["loca"]["cluster"], outputs["cluster"])


def test_what_the_index_of_a_patch_tells_is_guessing() -> None:
    """Patches that are encoded differ from sample to sample; redrawn places are of equal ones."""
    model = model_of(views={key: VIEWS[key] for key in ("view", "query")})
    head, batch = head_of(model), batch_of(model.views, 0, told=False, size=1024)
    batch = model.prepare(batch, 0.0)
    whole = batch["loca/place"]
    counts = torch.nn.functional.one_hot(whole.clamp_min(0), 16) * (whole >= 0).unsqueeze(-1)
    of_index = (counts.sum(0) + 0.1).log()  # the places of each patch
    found = head.answers({"logits": of_index[batch["loca/query"][:, 0]]}, batch)
    mean, deviation = found.chance()
    assert mean > 1.5 / 16
    assert (found.score() - mean).abs() < 4 * deviation


def test_a_query_that_is_the_reference_has_its_cells_in_order() -> None:
    model = model_of(query_mask_ratio=0.0)
    batch = batch_of(model.views, 0, told=True, size=2)
    batch["query/box"] = batch["view/box"]
    batch["query/flip"] = ~batch["view/flip"]
    places = head_of(model).places(model.prepare(batch, 0.0))[:, :16]
    mirrored = torch.arange(16).view(4, 4).flip(1).flatten()
    assert torch.equal(places, mirrored.expand(2, 16))


def test_the_loss_of_clusters_that_are_all_alike() -> None:
    """The cross-entropy is ln K, and so is the entropy of the mean: they cancel."""
    model = model_of()
    with torch.no_grad():
        head_of(model).clusters.last.weight.fill_(1.0)
    batch = model.prepare(batch_of(model.views, 0, told=True, size=8), 0.0)
    found, outputs = asked(model, batch)
    assert outputs["cluster"].flatten().tolist() == pytest.approx([math.log(32)] * 104)
    assert float(outputs["mean_entropy"]) == pytest.approx(math.log(32))
    log_prob = found.logits[found.counted].log_softmax(-1)
    place = -log_prob.gather(1, found.places[found.counted].unsqueeze(1)).mean()
    assert float(head_of(model).loss(outputs, batch)) == pytest.approx(float(place), abs=1e-5)


def test_queries_beside_the_reference_cost_nothing() -> None:
    model = model_of()
    batch = batch_of(model.views, 0, told=True, size=2)
    batch["view/box"] = torch.tensor([0.0, 0.0, 0.1, 0.1]).expand(2, 1, 4)
    for group in ("query", "focal"):
        batch[f"{group}/box"] = torch.tensor([0.5, 0.5, 1.0, 1.0]).expand_as(batch[f"{group}/box"])
    batch = model.prepare(batch, 0.0)
    found, outputs = asked(model, batch)
    assert not found.counted.any() and float(found.score()) == 0
    assert torch.equal(head_of(model).loss(outputs, batch), -outputs["mean_entropy"])


def test_sinkhorn_starts_from_softmaxed_rows() -> None:
    """As published: each round gives every cluster the same share, then every patch."""
    logits = torch.randn(24, 8) / 0.05
    shares = logits.softmax(-1)
    for _ in range(3):
        shares = shares / shares.sum(0)
        shares = shares / shares.sum(1, keepdim=True)
    torch.testing.assert_close(sinkhorn(logits.log_softmax(-1), 1.0), shares)


@pytest.mark.parametrize(
    ("positions", "options", "told"),
    [
        ("sincos", {}, False),
        ("learned", {"context_places": True}, True),
        ("rotary", {}, True),
        ("rotary", {"context_places": False}, False),
        ("none", {}, True),
    ],
)
def test_the_head_tells_the_places_of_the_reference_that_positions_do_not_leave(
    positions: str, options: dict[str, Any], told: bool
) -> None:
    cells = head_of(model_of(positions, **options)).cells
    assert bool(cells.any()) is told and cells.shape == (16 if told else 1, 32)


def test_it_learns_from_pictures_that_tell_the_place_and_from_no_others() -> None:
    """Guessing is better than one in N: an index within a view tells much of a cell."""
    for told in (True, False):
        model = model_of()
        found, _ = asked(model, next(train(model, 40, told=told, lr=5e-3)))
        mean, deviation = found.chance()
        above = float((found.score() - mean) / deviation)
        assert above > 6 if told else above < 4, (told, found.score(), mean, deviation)
