"""MP3: the invariants of the spec (section 8), an independent reference, and bad input."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pospre.algorithms.crop_field import CropField
from pospre.algorithms.droppos import smoothed_labels
from pospre.algorithms.mp3 import MP3, PatchPositions, num_context
from pospre.batch import Batch
from pospre.data.views.options import ViewGroup
from pospre.evaluation.position.predictions import Placer
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass
from pospre.model.progress import Progress
from pospre.nn.build import build_encoder
from pospre.nn.masking import slot_mask
from pospre.nn.positions import SCHEMES
from pospre.nn.positions.sincos import sincos_positions, sincos_positions_1d
from pospre.nn.positions.table import Table
from pospre.nn.vit import Encoder
from tests.algorithms.cases import Case, random_views, tiny_model, written

PATCHES = 16


def make_model(*algorithms: PretrainAlgorithm, views: int = 1, **encoder: Any) -> PretrainModel:
    options: dict[str, Any] = {"depth": 2, "positions": "none"} | encoder
    return tiny_model(*algorithms, views={"view": ViewGroup(size=32, count=views)}, **options)


def attached(
    *, views: int = 1, positions: str = "none", **options: Any
) -> tuple[PretrainModel, Batch]:
    model = make_model(MP3(**options), views=views, positions=positions)
    return model, model.prepare(random_views(views=views), Progress(0.0, 0.0))


def loss_of(model: PretrainModel, inputs: Batch) -> Tensor:
    return model.loss(model(inputs), inputs)["total"]


@pytest.mark.parametrize(
    ("patches", "ratio", "count"),
    [(196, 0.75, 49), (64, 0.8, 13), (196, 0.9, 20), (64, 0.5, 32), (98, 0.0, 98)],
)
def test_context_counts(patches: int, ratio: float, count: int) -> None:
    assert num_context(patches, ratio) == count


def test_permuting_patches_permutes_their_tokens_and_leaves_the_class_token() -> None:
    double = make_model().encoder.double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    context = torch.rand(2, PATCHES).argsort(dim=1)[:, :5]
    order = torch.randperm(PATCHES)
    place = order.argsort()  # where each patch went
    straight = double(images, context_BM=context)
    keep = order.expand(2, -1)
    shuffled = double(images, keep, context_BM=place[context])
    torch.testing.assert_close(shuffled[:, 0], straight[:, 0], atol=1e-13, rtol=0)
    torch.testing.assert_close(shuffled[:, 1:], straight[:, 1:][:, order], atol=1e-13, rtol=0)


@pytest.mark.parametrize("ratio", [0.0, 0.75])
def test_the_loss_starts_near_the_log_of_the_number_of_positions(ratio: float) -> None:
    model, inputs = attached(mask_ratio=ratio)
    assert float(loss_of(model, inputs).detach()) == pytest.approx(math.log(PATCHES), abs=0.15)


class Reference(nn.Module):
    """The paper's forward pass with an attention mask where ours gathers, in a few lines."""

    def __init__(self, encoder: Encoder, head: nn.Linear) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, images: Tensor, context: Tensor) -> Tensor:
        net = self.encoder
        patches = net.patch_embed.proj(images).flatten(2).transpose(1, 2)
        assert net.cls_token is not None
        x = torch.cat([net.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        visible = torch.cat([context.new_ones(len(x), 1), context], dim=1).bool()
        blocks: list[Any] = [*net.blocks]
        for block in blocks:
            heads = block.attn.num_heads
            qkv = F.linear(block.norm1(x), block.attn.qkv.weight, block.attn.qkv.bias)
            q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            logits = q @ k.mT / math.sqrt(q.shape[-1])
            logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
            x = x + block.attn.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
        prediction = self.head(net.norm(x)[:, 1:])
        target = torch.arange(prediction.shape[1]).repeat(len(prediction))
        return F.cross_entropy(prediction.flatten(0, 1), target)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.75])
def test_loss_and_gradients_are_those_of_an_independent_reference(ratio: float) -> None:
    model, inputs = attached(mask_ratio=ratio)
    everything = torch.arange(PATCHES).expand(4, 1, -1)
    context = slot_mask(inputs.get("mp3/context", everything)[:, 0], PATCHES).long()
    objective = model.objectives["mp3"]
    assert isinstance(objective, PatchPositions)
    reference = Reference(model.vit, objective.predict)(model.images(inputs)[:, 0], context)
    loss = loss_of(model, inputs)
    torch.testing.assert_close(loss, reference, atol=1e-6, rtol=1e-6)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = torch.autograd.grad(loss, list(trained.values()))
    theirs = torch.autograd.grad(reference, list(trained.values()))
    for name, mine, other in zip(trained, ours, theirs, strict=True):
        error = float((mine - other).norm())
        assert error <= 1e-4 * float(other.norm()) + 1e-7, name
        assert other.any(), f"{name} is not trained"


def forward_flops(ratio: float) -> float:
    with torch.device("meta"):
        model = build_encoder("vitb16", positions="none")
        images = torch.zeros(1, 3, 224, 224)
        patches = model.num_patches
        count = num_context(patches, ratio)
        context = torch.zeros(1, count, dtype=torch.int64) if count < patches else None
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(images, context_BM=context)
    return float(counter.get_total_flops())


def test_cost_of_vitb_is_the_specs() -> None:
    whole = forward_flops(0.0)
    ratios = [forward_flops(ratio) / whole for ratio in (0.3, 0.5, 0.75, 0.9)]
    assert ratios == pytest.approx([0.94, 0.90, 0.853, 0.823], abs=0.005)


def test_accuracies_are_of_all_of_the_context_and_of_the_others() -> None:
    model, inputs = attached(mask_ratio=0.75)
    outputs = model(inputs)
    context = slot_mask(inputs["mp3/context"][:, 0], PATCHES)
    right = torch.eye(PATCHES).expand(4, -1, -1)
    # right in the context, wrong outside
    outputs["mp3"]["logits"] = torch.where(context.unsqueeze(-1), right, -right)
    terms = model.loss(outputs, inputs)
    assert terms["metric/mp3_accuracy"] == 0.25
    assert terms["metric/mp3_context_accuracy"] == 1
    assert terms["metric/mp3_masked_accuracy"] == 0


def test_without_masking_there_is_one_accuracy() -> None:
    model, inputs = attached(mask_ratio=0.0)
    measured = {key for key in model.loss(model(inputs), inputs) if key.startswith("metric/")}
    assert measured == {"metric/mp3_accuracy"} and "mp3/context" not in inputs
    assert model.layout.passes["student"] == EncoderPass(readers=("mp3",))


def test_smoothing_is_cross_entropy_with_dropposs_soft_labels() -> None:
    model, inputs = attached(sigma_start=1.0)
    outputs = model(inputs)
    objective = model.objectives["mp3"]
    assert isinstance(objective, PatchPositions)
    labels = smoothed_labels(objective.distance_NN, torch.tensor(1.0))
    expected = F.cross_entropy(
        outputs["mp3"]["logits"].flatten(0, 1), labels.repeat(len(inputs["index"]), 1)
    )
    torch.testing.assert_close(model.loss(outputs, inputs)["total"], expected)
    MP3(sigma_start=1.0, sigma_end=0.5).schedule(model, Progress(0.5, 0.0))
    assert objective.sigma.item() == pytest.approx(0.75)


def test_attentive_weights_come_from_a_pass_with_all_patches_as_context() -> None:
    model, inputs = attached(temperature=0.1)
    outputs = model(inputs)
    affinity = outputs["mp3"]["affinity"]
    tokens = model.encoder(model.images(inputs)[:, 0])
    similarity = F.cosine_similarity(tokens[:, :1], tokens[:, 1:], dim=-1)
    torch.testing.assert_close(affinity, (similarity / 0.1).softmax(-1))
    assert not affinity.requires_grad
    target = torch.arange(PATCHES).repeat(4)
    costs = F.cross_entropy(outputs["mp3"]["logits"].flatten(0, 1), target, reduction="none")
    expected = (costs * affinity.flatten()).sum() / 4
    torch.testing.assert_close(model.loss(outputs, inputs)["total"], expected)


def test_a_share_of_patches_is_told_its_position_and_left_out() -> None:
    model, inputs = attached(position_rate=0.2, positions="sincos")
    known = inputs["mp3/known"]
    assert known.shape == (4, 1, PATCHES) and (known.sum(2) == 3).all()
    outputs = model(inputs)
    logits, asked = outputs["mp3"]["logits"], ~known[:, 0]
    target = torch.arange(PATCHES).expand(4, -1)
    torch.testing.assert_close(
        model.loss(outputs, inputs)["total"], F.cross_entropy(logits[asked], target[asked])
    )
    right = torch.eye(PATCHES).expand(4, -1, -1)
    outputs["mp3"]["logits"] = torch.where(asked.unsqueeze(-1), right, -right)
    assert model.loss(outputs, inputs)["metric/mp3_accuracy"] == 1
    counted, same = attached(position_rate=0.2, count_shown=True, positions="sincos")
    torch.testing.assert_close(
        loss_of(counted, same), F.cross_entropy(logits.flatten(0, 1), target.flatten())
    )


def gradients(loss: Tensor, model: PretrainModel) -> dict[str, Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_told_is_a_sinusoid_added_to_patches_without_positions(sequence: bool) -> None:
    """The paper's way, here on the whole model: loss and gradients are the same to the last bit."""
    shape: dict[str, Any] = {"patch_size": (2, 32)} if sequence else {}
    table = sincos_positions_1d(192, PATCHES) if sequence else sincos_positions(192, 4, 4)
    model = make_model(MP3(position_rate=0.2), positions="sincos", **shape)
    bare = make_model(MP3(), **shape)
    missing = bare.load_state_dict(model.state_dict(), strict=False)
    assert missing.unexpected_keys == ["encoder.positions.pos_embed"] and not missing.missing_keys
    inputs = model.draw(random_views())
    shown = inputs["mp3/known"][:, 0].unsqueeze(-1)
    tokens = bare.encoder(
        bare.images(inputs)[:, 0],
        content=lambda tokens: tokens + shown * table,
        context_BM=inputs["mp3/context"][:, 0],
    )
    objective = bare.objectives["mp3"]
    expected = objective.loss(objective({"student": tokens}, inputs), inputs)
    loss = loss_of(model, inputs)
    assert torch.equal(loss, expected)
    ours, theirs = gradients(loss, model), gradients(expected, bare)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("positions", [name for name in SCHEMES if name != "none"])
def test_without_told_patches_every_scheme_is_none(positions: str) -> None:
    """The class token's row of a table, and its bias to itself, are no places: they go on."""
    model, inputs = attached(positions=positions, mask_ratio=0.5, temperature=0.1)
    bare, _ = attached(mask_ratio=0.5, temperature=0.1)
    bare.load_state_dict(model.state_dict(), strict=False)
    row = model.encoder.positions.prefix()
    with torch.no_grad():
        bare.encoder.get_parameter("cls_token").add_(0 if row is None else row)
        for name, parameter in model.encoder.positions.named_parameters():
            if "pos_embed" not in name:  # biases begin as zeros
                parameter[:-1].normal_()
    torch.testing.assert_close(loss_of(model, inputs), loss_of(bare, inputs), atol=2e-6, rtol=0)


@pytest.mark.parametrize("told", [0.0, 0.2])
def test_prediction_draws_the_training_context(told: float) -> None:
    model, inputs = attached(mask_ratio=0.5, position_rate=told, positions="sincos")
    model.eval()
    place = Placer(model, seed=7)
    logits, _, asked, context = place(random_views(), 0.5)
    torch.testing.assert_close(logits, model(inputs)["mp3"]["logits"].detach())
    assert torch.equal(context, slot_mask(inputs["mp3/context"][:, 0], PATCHES))
    assert asked.sum(1).tolist() == [PATCHES - round(told * PATCHES)] * 4
    assert place(random_views(), 0.0).context.all()


def test_a_model_trained_without_masking_can_be_asked_with_it() -> None:
    model, inputs = attached(mask_ratio=0.0)
    model.eval()
    place = Placer(model, seed=7)
    whole = place(random_views(), 0.0).logits
    torch.testing.assert_close(whole, model(inputs)["mp3"]["logits"].detach())
    part, _, _, context = place(random_views(), 0.75)
    assert (context.sum(1) == 4).all() and not torch.allclose(part, whole)


def test_it_works_without_class_token_and_with_registers() -> None:
    model = make_model(MP3(), class_token=False, num_registers=2)
    inputs = model.draw(random_views())
    assert model(inputs)["mp3"]["logits"].shape == (4, PATCHES, PATCHES)


def test_positions_that_no_pass_tells_are_warned_of() -> None:
    def warned(names: tuple[str, ...], positions: str, **options: float) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Case(names, {"mp3": options}, {"positions": positions}).build()
        return any("is never used in training" in str(each.message) for each in caught)

    assert warned(("mp3",), "sincos") and warned(("mp3", "crop_field"), "learned")
    assert not warned(("mp3",), "none")
    assert not warned(("mp3",), "sincos", position_rate=0.25)
    assert not warned(("dinov2", "mp3"), "rotary")


def test_beside_dinov2_only_its_own_pass_forgets_places() -> None:
    case = Case(("dinov2", "mp3"), {"mp3": {"position_rate": 0.25}}, {"positions": "rotary"})
    model = case.build()
    assert [name for name, done in model.layout.passes.items() if done.places] == ["student"]
    written(model, case.batch())


def test_a_field_of_positions_is_hidden_but_for_what_is_told() -> None:
    model = make_model(CropField(field_size=9), MP3(position_rate=0.25), positions="learned")
    inputs = {**random_views(), "view/box": torch.tensor([0.1, 0.2, 0.7, 0.9]).expand(4, 1, 4)}
    model.draw(inputs)
    loss_of(model, inputs).backward()
    table = model.encoder.positions
    assert isinstance(table, Table) and table.pos_embed.grad is not None
    assert table.pos_embed.grad[0, 1:].any()
    moved = {**inputs, "view/field_box": torch.rand(4, 1, 4)}
    assert loss_of(model, moved) != loss_of(model, inputs)
    inputs["mp3/known"], moved["mp3/known"] = (torch.zeros(4, 1, PATCHES, dtype=torch.bool),) * 2
    assert loss_of(model, moved) == loss_of(model, inputs)
